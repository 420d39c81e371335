"""FedProx: FedAvg whose clients are held near the global model by a penalty.

Li et al., Federated Optimization in Heterogeneous Networks, 2020.

  w_k ← w_k − η (∇f(w_k; B) + μ (w_k − w)), w the model that came down

Deviations: every client does the same work; the paper's lets slow ones do less. The penalty holds
parameters, never statistics. Clipping, where it is set, measures the whole gradient.
"""

from typing import Any

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
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
    """Server, clients and mean as FedAvg's.

    Args:
      mu: μ, how firmly clients are held near the global model; 0 is FedAvg.
    """
    require_at_least("fedprox.mu", mu, 0)

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        w, rest = local_training.split_variables(payload)
        near = common.held(local_training.gradient(model, federation.task, ctx.data), w, mu)
        params, rest, client, metrics = local_training.fit(training, near, w, rest, client, ctx)
        variables = {"params": params, **rest}
        return ClientResult(variables, variables, client, metrics)

    return fedavg(model, training, federation)._replace(train=train)


FEDPROX = Method(fedprox, title="FedProx", paper="Li et al. 2020")
