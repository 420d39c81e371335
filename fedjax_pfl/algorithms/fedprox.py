"""FedProx: FedAvg with a penalty on the distance between a client's model and the global model.

Li et al., Federated Optimization in Heterogeneous Networks, 2020.

  w_k ← w_k − η (∇f(w_k; B) + μ (w_k − w)), with the downloaded w

Deviations: clients are sampled uniformly and weighted by their examples; the paper samples by
numbers of examples and takes the plain mean. Clients do the same amount of work by default; in the
paper slow clients do less. With `late=partial` they do here too, and the server then averages as
FedNova does. The penalty applies to parameters only. Clipping, if set, uses the norm of the whole
gradient.
"""

from typing import Any

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables, proximal
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, ClientResult, Federation, PyTree
from fedjax_pfl.core.errors import require_at_least


def fedprox(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    mu: float = 0.1,
) -> Algorithm:
    """Creates FedProx: FedAvg with a penalty μ/2 ‖w_k − w‖² in each client's loss.

    w_k is the client's, w the downloaded model. State and mean are the same as for FedAvg.

    Args:
      mu: μ, the weight of the distance to the global model; 0 is FedAvg.
    """
    require_at_least("fedprox.mu", mu, 0)

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        gradient = local_training.gradient(model, federation.task, ctx.data)
        gradient = proximal(gradient, payload["params"], mu)
        variables, momentum, metrics = fit_variables(training, gradient, payload, client, ctx)
        return ClientResult(upload=variables, variables=variables, client=momentum, metrics=metrics)

    return fedavg(model, training, federation)._replace(train=train)


FEDPROX = Method(fedprox, title="FedProx", paper="Li et al. 2020")
