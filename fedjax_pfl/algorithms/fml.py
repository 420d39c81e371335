"""FML: each client's own model and a copy of a shared model learn from each other.

Shen et al., Federated Mutual Learning, 2020. Client i has a personal model θ_i, of any
architecture, and trains it together with a copy w_i of the shared model w (the paper's meme
model). With p(θ) the predicted probabilities, for every local batch:

  θ_i ← θ_i − η ∇_θ [α f_i(θ_i) + (1 − α) KL(p(w_i) ‖ p(θ_i))]
  w_i ← w_i − η ∇_w [β f_i(w_i) + (1 − β) KL(p(θ_i) ‖ p(w_i))]
  w ← Σ_k n_k w_k / Σ_k n_k
Both steps use the values before the step. A client is served θ_i.

Deviations: none known. PFLlib's code divides the divergence by the number of classes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.shared.initial_state import (
    initial_client_rows,
    initial_momentum,
    initial_variables,
)
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables
from fedjax_pfl.core import local_training, optimizers
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require
from fedjax_pfl.core.groups import share_server
from fedjax_pfl.core.metrics import mask_logits
from fedjax_pfl.core.task import Task


class Client(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    personal: PyTree  # variables of its own model θ_i
    momentum: PyTree  # optimiser state of both models, or () if clients do not keep it


class Pair(NamedTuple):
    """Two networks; each collection of the variables has their entries `personal`, `shared`."""

    personal: Any
    shared: Any

    def apply(self, variables: PyTree, x: jax.Array, **options: Any) -> Any:
        """Returns (outputs of both networks, collections that training updates)."""
        results = [
            network.apply(part(variables, name), x, **options)
            for name, network in self._asdict().items()
        ]
        outputs, updated = zip(*results, strict=True)
        return outputs, pair(*updated)


def part(variables: PyTree, name: str) -> PyTree:
    """Returns the variables of one network of a pair."""
    return {collection: tree[name] for collection, tree in variables.items() if name in tree}


def pair(personal: PyTree, shared: PyTree) -> PyTree:
    """Returns the variables of a pair from those of its networks."""
    joined: dict[str, Any] = {}
    for name, variables in (("personal", personal), ("shared", shared)):
        for collection, tree in variables.items():
            joined.setdefault(collection, {})[name] = tree
    return joined


def divergence(p: jax.Array, q: jax.Array, classes: Any = None) -> jax.Array:
    """Returns KL(softmax(p) ‖ softmax(q)) of each example, [B], without a gradient to p.

    Args:
      p: Logits [..., C] of the model that teaches.
      q: Logits of the model that learns.
      classes: Bool [C], the classes that the client uses; others have probability 0. None: all.
    """
    p, q = mask_logits(jax.lax.stop_gradient(p), classes), mask_logits(q, classes)
    log_p, log_q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def mutual(task: Task, alpha: Any, beta: Any) -> Task:
    """Returns the task of a pair: the sum of both models' losses, for outputs of `Pair`."""

    def loss(outputs: Any, y: jax.Array, classes: Any) -> jax.Array:
        personal, shared = outputs
        personal_loss = alpha * task.loss(personal, y, classes) + (1 - alpha) * divergence(
            shared, personal, classes
        )
        shared_loss = beta * task.loss(shared, y, classes) + (1 - beta) * divergence(
            personal, shared, classes
        )
        return personal_loss + shared_loss

    return task._replace(loss=loss)


def fml(
    models: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
) -> Algorithm:
    """Creates FML, for classification: personal models that learn from a shared one, and teach it.

    `models` is a network, or a tuple with one for each group of clients; the shared model is of the
    first one. The server stores the variables of the shared model, clients store `Client`. The
    loss that is reported is the sum of both models'.

    Args:
      alpha: Weight of a client's labels in the loss of its personal model, between 0 and 1; the
        divergence from the shared model's predictions has the rest.
      beta: The same for the shared model.
    """
    for name, weight in (("alpha", alpha), ("beta", beta)):
        require((weight >= 0) & (weight <= 1), f"fml.{name} is {weight}; it is a share, 0 to 1")
    if not federation.task.has_classes:
        raise UsageError("fml compares probabilities of classes; choose a dataset with classes")
    shared_model = models[0] if isinstance(models, tuple) else models
    task = mutual(federation.task, alpha, beta)
    separate = training.with_optimizer(optimizers.per_entry(training.optimizer))

    def for_network(model: Any) -> Algorithm:
        network = Pair(personal=model, shared=shared_model)

        def init(key: jax.Array, start: State | None = None) -> State:
            shared = initial_variables(shared_model, federation, key, start)
            personal = shared
            if model is not shared_model:
                personal = initial_variables(model, federation, jax.random.fold_in(key, 1), None)
            params = pair(personal, shared)["params"]
            rows = initial_client_rows(personal, start, Client, "personal", federation)
            momentum = initial_momentum(separate, params, federation)
            return State(shared, (), Client(rows, momentum))

        def send(state: State, ctx: ClientContext) -> PyTree:
            return state.server

        def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
            gradient = local_training.gradient(network, task, ctx.data)
            variables, momentum, metrics = fit_variables(
                separate, gradient, pair(client.personal, payload), client.momentum, ctx
            )
            personal = part(variables, "personal")
            return ClientResult(
                upload=part(variables, "shared"),
                variables=personal,
                client=Client(personal, momentum),
                metrics=metrics,
            )

        def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
            return cohort.mean(cohort.uploads, state.server), state.rows

        def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
            return client.personal

        return Algorithm(
            init=init,
            send=send,
            train=train,
            receive=receive,
            personalize=personalize,
            predict=model.apply,
        )

    return share_server(models, for_network)


FML = Method(fml, title="FML", paper="Shen et al. 2020")
