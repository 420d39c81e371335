"""FedTGP: FedProto with prototypes that the server trains, so that classes stay apart.

Zhang et al., FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning, 2024. Clients train and send
prototypes C_ic as in FedProto, with P_c in place of its mean prototypes. With φ the Euclidean
distance, the server has a vector per class and a network F with one hidden layer:

  P_c = F(vector of c)
  δ = min(max φ(Q_c, Q_c'), τ), over c ≠ c', with Q_c the mean of C_ic over clients
  loss of C_ic = −log( e^−(φ(C_ic, P_c) + δ) / (e^−(φ(C_ic, P_c) + δ) + Σ_c'≠c e^−φ(C_ic, P_c')) )
  The vectors and F are trained by gradient descent on the mean loss of a client's prototypes, one
  step for each client, in several epochs
Each client keeps its own model and predicts as in FedProto.

Deviations: the clients' penalty is λ mean_x ‖z(x) − P_y‖²/d, as in the authors' code; the paper has
λ = 0.1 and distances that are not squared. The default λ is 1; the authors' commands have 10, with
which training with higher rates than theirs can diverge. Their code shuffles the prototypes of all
clients into batches of 10, and takes for δ the largest over classes of the smallest distance to
another class. Clients have no penalty in the first round, as in the code.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedproto import DECIDERS, FEDPROTO, fedproto
from fedjax_pfl.algorithms.local import LocalClient
from fedjax_pfl.algorithms.shared.initial_state import continuing
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require_at_least, require_one_of
from fedjax_pfl.core.groups import share_server
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.networks import features

_TINY = 1e-12  # the square root has no slope at 0


class Generator(nn.Module):
    """The vectors of C classes and the network F: () -> prototypes [C, d]."""

    classes: int
    d: int

    @nn.compact
    def __call__(self) -> jax.Array:
        normal = nn.initializers.normal(1.0)
        vectors = self.param("vectors", normal, (self.classes, self.d))
        return nn.Dense(self.d, name="output")(nn.relu(nn.Dense(self.d, name="hidden")(vectors)))


def distances(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the Euclidean distances [C, C] of the rows of a and b, both [C, d]."""
    squares = jnp.sum(jnp.square(a[:, None] - b[None]), -1)
    return jnp.sqrt(jnp.maximum(squares, _TINY))


def adaptive_margin(prototypes: jax.Array, sent: jax.Array, threshold: Any) -> jax.Array:
    """Returns δ: the largest distance of two classes' mean prototypes, at most `threshold`.

    Args:
      prototypes: Those of K clients, [K, C, d].
      sent: Bool [K, C], True for the classes of which a client sent one.
      threshold: τ.
    """
    weight = sent.astype(jnp.float32)
    total = jnp.sum(weight, 0)
    mean = jnp.einsum("kc,kcd->cd", weight, prototypes) / jnp.maximum(total, 1.0)[:, None]
    exists = total > 0
    pairs = exists[:, None] & exists[None] & ~jnp.eye(len(exists), dtype=bool)
    return jnp.minimum(jnp.max(jnp.where(pairs, distances(mean, mean), 0.0)), threshold)


def contrastive_loss(
    trained: jax.Array, prototypes: jax.Array, sent: jax.Array, margin: Any
) -> jax.Array:
    """Returns the mean loss of one client's prototypes [C, d] that were `sent`, bool [C].

    Args:
      trained: P, [C, d].
      prototypes: Those of the client.
      sent: True for the classes of which there is a prototype.
      margin: δ.
    """
    logits = -(distances(prototypes, trained) + margin * jnp.eye(len(sent)))
    losses = -jnp.diagonal(jax.nn.log_softmax(logits))
    number = jnp.sum(sent.astype(jnp.float32))
    return jnp.sum(jnp.where(sent, losses, 0.0)) / jnp.maximum(number, 1.0)


def fedtgp(
    models: Any,
    training: Training,
    federation: Federation,
    *,
    penalty: float = 1.0,
    rate: float = 0.01,
    epochs: int = 100,
    threshold: float = 100.0,
    decides: str = "prototype",
) -> Algorithm:
    """Creates FedTGP, for classification: the server learns prototypes from clients' class means.

    A class mean is the mean of the features of a client's examples of the class.

    `models` is a network, or a tuple with one for each group of clients, whose features have the
    same length. The server stores the prototypes P, which classes have one, and the parameters of
    `Generator`; clients store the same as Local.

    Args:
      penalty: λ, the weight of the squared distance between an example's features and its
        prototype, divided by their number.
      rate: Learning rate of the network, on the server, that generates the prototypes.
      epochs: Number of epochs of the server's training in a round.
      threshold: τ, the largest margin δ.
      decides: What predicts when a client's model is evaluated: the nearest prototype or its head.
    """
    require_at_least("fedtgp.penalty", penalty, 0)
    require_at_least("fedtgp.rate", rate, 0)
    require_at_least("fedtgp.epochs", epochs, 1)
    require_at_least("fedtgp.threshold", threshold, 0)
    require_one_of("fedtgp.decides", decides, DECIDERS)
    if not federation.task.has_classes:
        raise UsageError("fedtgp makes a prototype of each class; choose a dataset with classes")
    d = features.common_width("fedtgp", models, federation)
    generator: Any = Generator(federation.outputs, d)

    def prototypes_of(state: State) -> PyTree:
        return {name: state.server[name] for name in ("prototypes", "seen")}

    def train_generator(params: PyTree, uploads: PyTree, sent: jax.Array) -> PyTree:
        """Returns new parameters of the generator from stacked uploads; `sent` is bool [K, C]."""
        margin = adaptive_margin(uploads["prototypes"], sent, threshold)

        def step(params: PyTree, client: tuple[jax.Array, jax.Array]) -> tuple[PyTree, None]:
            def loss(params: PyTree) -> jax.Array:
                return contrastive_loss(generator.apply({"params": params}), *client, margin)

            return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params)), None

        def epoch(params: PyTree, _: None) -> tuple[PyTree, None]:
            return jax.lax.scan(step, params, (uploads["prototypes"], sent))

        return jax.lax.scan(epoch, params, None, epochs)[0]

    def for_network(model: Any) -> Algorithm:
        base = fedproto(model, training, federation, penalty=penalty, decides=decides)

        def init(key: jax.Array, start: State | None = None) -> State:
            state = base.init(key, start)
            params = generator.init(jax.random.fold_in(key, 1))["params"]
            return state._replace(server={**state.server, "generator": params})

        def send(state: State, ctx: ClientContext) -> PyTree:
            return prototypes_of(state)

        def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
            uploads = cohort.present(cohort.uploads)
            sent = uploads["counts"] > 0
            params = train_generator(state.server["generator"], uploads, sent)
            prototypes = generator.apply({"params": params})
            seen = jnp.ones_like(state.server["seen"])
            return {"prototypes": prototypes, "seen": seen, "generator": params}, state.rows

        def personalize(state: State, client: LocalClient, ctx: ClientContext) -> PyTree:
            return base.personalize(state._replace(server=prototypes_of(state)), client, ctx)

        return base._replace(
            init=continuing(init), send=send, receive=receive, personalize=personalize
        )

    return share_server(models, for_network)


FEDTGP = Method(fedtgp, title="FedTGP", paper="Zhang et al. 2024", pictures=FEDPROTO.pictures)
