"""pFedFDA: Gaussians of the features of each class classify, and each client mixes in its own.

McLaughlin and Su, Personalized Federated Learning via Feature Distribution Adaptation, 2024. The
body φ computes d features z = φ(x), which have the distribution N(μ_c, Σ) in class c. Of the n_i
examples of client i the share π_ic is of class c. The linear head h(μ, Σ, π_i) is Bayes' rule:

  h_c(z) = μ_cᵀ Σ⁻¹ z − μ_cᵀ Σ⁻¹ μ_c / 2 + log π_ic
  φ_i ← SGD on f_i with the head h(μ, Σ, π_i), which does not train, from φ
  μ̂_c = mean of φ_i(x) over the client's examples of class c, or μ_c if it has fewer than three
  Σ̂ = Σ_x (φ_i(x) − μ̂_y)(φ_i(x) − μ̂_y)ᵀ/(n_i − 1) + ε I
  (μ_i, Σ_i) = β (μ̂, Σ̂) + (1 − β) (μ, Σ)
  β minimises the cross-entropy of two-fold cross-validation, with (μ̂, Σ̂) of the other fold
  φ ← Σ_i n_i φ_i / Σ_i n_i,   and μ and Σ in the same way from μ_i and Σ_i
A client is served φ and the head h(μ_i, Σ_i, π_i), with β, μ̂ and Σ̂ for φ instead of φ_i.

As in the authors' code, Σ starts as the identity and μ as uniform random numbers, 1e-4 is added to
the shares of classes before they are divided by their sum, and the head uses Σ with 1e-4 of it
replaced by its mean variance.

Deviations: β is the best of 0, 0.1, ..., 1; the authors use L-BFGS. The folds are every second
example of each class; theirs are random. Features are those of φ_i after training; the authors'
code takes them during training. ε = 1 is from that code, which also adds 1e-4 to all entries of Σ̂
and by default has a second β for Σ. It uses μ_c for classes with fewer than three examples only in
the model that is served; here also in training and in the folds of cross-validation. The server
sends Σ with eigenvalues of at least min(1, ε) / 2. Without this they are at least min(1, ε), unless
something changes uploads, such as noise for privacy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.class_features import class_counts, example_features
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_momentum,
    initial_variables,
    model_shapes,
)
from fedjax_pfl.algorithms.shared.linear_head import head_layer, head_variables, linear_head_width
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.algorithms.shared.split_model import require_body
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require_above
from fedjax_pfl.core.examples import ClientData

_BETAS = tuple(i / 10 for i in range(11))
_FEWEST = 3  # examples of a class for a mean of its own
_SMALL = 1e-4  # is added to the share of a class; weight of the mean variance


class Gaussians(NamedTuple):
    """Distribution N(μ_c, Σ) of the features of each class c."""

    means: jax.Array  # μ, [C, d]
    covariance: jax.Array  # Σ, [d, d]


def bayes_head(gaussians: Gaussians, shares: jax.Array) -> PyTree:
    """Returns the head {"kernel": [d, C], "bias": [C]} whose softmax is the posterior of classes.

    Args:
      gaussians: Distribution of the features of each class.
      shares: π, shares of the classes, [C].
    """
    means, covariance = gaussians
    d = len(covariance)
    mean_variance = jnp.trace(covariance) / d
    covariance = (1 - _SMALL) * covariance + _SMALL * mean_variance * jnp.eye(d)
    kernel = jax.scipy.linalg.solve(covariance, means.T, assume_a="pos")
    return {"kernel": kernel, "bias": jnp.log(shares) - jnp.sum(means.T * kernel, 0) / 2}


def bound_eigenvalues(covariance: jax.Array, least: Any) -> jax.Array:
    """Returns a covariance whose eigenvalues are at least `least`, such as after noise.

    It is unchanged, bit for bit, if they are. As in `bayes_head`, the upper triangle decides.

    Args:
      covariance: Σ, [d, d].
      least: Least eigenvalue.
    """

    def bound(covariance: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh((covariance + covariance.T) / 2)
        scaled = vectors * jnp.maximum(values, least)[None]
        return jnp.matmul(scaled, vectors.T, precision="highest")

    factor = jax.scipy.linalg.cholesky(covariance - least * jnp.eye(len(covariance)))
    is_bounded = jnp.all(jnp.isfinite(factor))
    return jax.lax.cond(is_bounded, lambda covariance: covariance, bound, covariance)


def fit_gaussians(z: jax.Array, member: jax.Array, shared: jax.Array, ridge: Any) -> Gaussians:
    """Estimates the distribution of the features of each class.

    Args:
      z: Features, [n, d].
      member: [n, C], 1 at the class of each example that counts, else 0.
      shared: Means [C, d] of classes with fewer than three examples.
      ridge: ε, added to the diagonal of the covariance.
    """
    counts = jnp.sum(member, 0)
    sums = jnp.matmul(member.T, z, precision="highest")
    client_means = sums / jnp.maximum(counts, 1.0)[:, None]
    means = jnp.where(counts[:, None] >= _FEWEST, client_means, shared)
    residuals = jnp.sum(member, 1, keepdims=True) * z - jnp.matmul(
        member, means, precision="highest"
    )
    scatter = jnp.matmul(residuals.T, residuals, precision="highest")
    covariance = scatter / jnp.maximum(jnp.sum(counts) - 1, 1.0) + ridge * jnp.eye(z.shape[1])
    return Gaussians(means, covariance)


def interpolate(beta: Any, own: Gaussians, shared: Gaussians) -> Gaussians:
    """Returns β times a client's own Gaussians plus 1 − β times the shared ones."""
    return jax.tree.map(lambda a, b: beta * a + (1 - beta) * b, own, shared)


def select_beta(
    z: jax.Array, member: jax.Array, shared: Gaussians, shares: jax.Array, ridge: Any
) -> jax.Array:
    """Returns the β, a multiple of 0.1, with the lowest cross-entropy in cross-validation.

    Classes with one example are left out. Without others β is 0. Arguments as for `fit_gaussians`
    and `bayes_head`.
    """
    member = jnp.where(jnp.sum(member, 0, keepdims=True) >= 2, member, 0.0)
    is_odd = jnp.sum(jnp.cumsum(member, 0) * member, 1, keepdims=True) % 2
    folds = (member * is_odd, member * (1 - is_odd))
    fitted = [fit_gaussians(z, fold, shared.means, ridge) for fold in folds]

    def loss(beta: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for gaussians, tested in zip(fitted, reversed(folds), strict=True):
            head = bayes_head(interpolate(beta, gaussians, shared), shares)
            logits = jnp.matmul(z, head["kernel"], precision="highest") + head["bias"][None]
            entropy = -jnp.sum(tested * jax.nn.log_softmax(logits))
            total += entropy / jnp.maximum(jnp.sum(tested), 1.0)
        return total

    betas = jnp.asarray(_BETAS)
    return betas[jnp.argmin(jax.lax.map(loss, betas))]


def pfedfda(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    ridge: float = 1.0,
) -> Algorithm:
    """Creates pFedFDA, for classification: heads made of the distribution of the features.

    The network's last layer must be linear with a bias. The server stores the body and the
    Gaussians, which are sent both ways; clients store the optimiser state of the body.

    Args:
      ridge: ε, added to the diagonal of a client's covariance matrix.
    """
    require_above("pfedfda.ridge", ridge, 0)
    if not federation.task.has_classes:
        raise UsageError("pfedfda fits the features of each class; choose a dataset with classes")
    d, classes = linear_head_width("pfedfda", model, federation), federation.outputs
    require_body("pfedfda", model, federation)
    if "bias" not in head_layer(model, model_shapes(model, federation)):
        raise UsageError(f"pfedfda needs a head with a bias, and {model.head} has none; add one")
    base = fedavg(model, training, federation)
    train_body = model_trainer(model, federation.task, training)

    def parts(tree: PyTree) -> tuple[PyTree, Gaussians]:
        """Returns the body and the Gaussians in a tree like the server's."""
        body = dict(tree)
        return body, Gaussians(means=body.pop("means"), covariance=body.pop("covariance"))

    def send(state: State, ctx: ClientContext) -> PyTree:
        covariance = bound_eigenvalues(state.server["covariance"], jnp.minimum(1.0, ridge) / 2)
        return {**state.server, "covariance": covariance}

    def new_server(key: jax.Array, start: State | None = None) -> PyTree:
        _, body = trees.split(initial_variables(model, federation, key, start), {model.head})
        means = jax.random.uniform(jax.random.fold_in(key, 1), (classes, d))
        return {**body, "means": means, "covariance": jnp.eye(d)}

    def init(key: jax.Array, start: State | None = None) -> State:
        shapes = jax.eval_shape(new_server, key)
        is_own = start is not None and trees.same_shapes(shapes, start.server)
        server = start.server if start is not None and is_own else new_server(key, start)
        return State(server, (), initial_momentum(training, server["params"], federation))

    def shares_of(data: ClientData) -> jax.Array:
        counts = class_counts(data, classes)
        shares = counts / jnp.maximum(jnp.sum(counts), 1.0) + _SMALL
        return shares / jnp.sum(shares)

    def with_head(body: PyTree, gaussians: Gaussians, shares: jax.Array) -> PyTree:
        return trees.join(body, head_variables(model, bayes_head(gaussians, shares)))

    def adapt(variables: PyTree, shared: Gaussians, data: ClientData) -> tuple[Any, Gaussians]:
        """Returns β and the client's Gaussians (μ_i, Σ_i)."""
        z, y, is_example = example_features(model, variables, data)
        member = jnp.where(is_example[:, None], jax.nn.one_hot(y, classes), 0.0)
        beta = select_beta(z, member, shared, shares_of(data), ridge)
        return beta, interpolate(beta, fit_gaussians(z, member, shared.means, ridge), shared)

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        body, shared = parts(payload)
        shares = shares_of(ctx.data)
        head = head_variables(model, bayes_head(shared, shares))
        body, momentum, metrics = train_body(body, client, ctx, head)
        beta, gaussians = adapt(trees.join(body, head), shared, ctx.data)
        return ClientResult(
            upload={**body, **gaussians._asdict()},
            variables=with_head(body, gaussians, shares),
            client=momentum,
            metrics={**metrics, "beta": beta},
        )

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        body, shared = parts(send(state, ctx))
        shares = shares_of(ctx.data)
        _, gaussians = adapt(with_head(body, shared, shares), shared, ctx.data)
        return with_head(body, gaussians, shares)

    return base._replace(init=init, send=send, train=train, personalize=personalize)


PFEDFDA = Method(pfedfda, title="pFedFDA", paper="McLaughlin and Su 2024")
