"""FedAvg+: the global model, fine-tuned by each client on its own examples before it is used.

Jiang et al., Improving Federated Learning Personalization via Model Agnostic Meta Learning, 2019,
as evaluated by Marfoq et al., Federated Multi-Task Learning under a Mixture of Distributions, 2021.

  θ_i = one local epoch from w, at evaluation; it is discarded

Deviations: the first paper also trains the global model with a server optimiser before
personalisation; here, as in the second paper, there is no such stage. Momentum starts at zero in
each fine-tuning; in the second paper's code it continues.
"""

from typing import Any

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Federation, PyTree, State
from fedjax_pfl.core.errors import require_above, require_at_least
from fedjax_pfl.core.local_training import Training, constant_rate


def fedavg_plus(
    model: Any,
    training: Training,
    federation: Federation,
    *,
    rate: float | None = None,
    epochs: int = 1,
) -> Algorithm:
    """Creates FedAvg+: each client fine-tunes a copy of FedAvg's model when it is evaluated.

    State and training are the same as for FedAvg.

    Args:
      rate: Learning rate of the fine-tuning, in all rounds. Unset: the rate of training. With
        your own optax optimiser it multiplies the steps.
      epochs: Passes over a client's training examples in the fine-tuning.
    """
    require_above("fedavg_plus.rate", rate, 0)
    require_at_least("fedavg_plus.epochs", epochs, 1)
    tuning = training._replace(
        rate=training.rate if rate is None else constant_rate(rate),
        epochs=epochs,
        steps=None,
        keep_optimizer=False,
    )
    fine_tune = model_trainer(model, federation.task, tuning)

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return fine_tune(state.server, (), ctx)[0]

    return fedavg(model, training, federation)._replace(personalize=personalize)


FEDAVG_PLUS = Method(fedavg_plus, title="FedAvg+", paper="Jiang et al. 2019")
