"""Some layers stay with each client, such as the head where clients' labels do not agree.

Wherever a model of these layers comes down, or lies with the server, the client reads its own
instead; what goes up has the values that came down, so that the server learns nothing of them and
mixes what all have alike. They do not travel and are not billed. What a method itself leaves with
the client, such as FedFomo's last start, gets the client's own layers too.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path as leaves_of
from jax.tree_util import tree_map_with_path as map_with_path

from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
    Traffic,
)
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.core.groups import has_groups
from fedjax_pfl.core.setting import Setting
from fedjax_pfl.transforms.wrapping import Around, Selectable, Transform, keeping


class Client(NamedTuple):
    """What stays with a client: what the method leaves there, and its own layers."""

    method: PyTree
    own: PyTree


def _found(tree: PyTree, own: PyTree, skip: int = 1) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """The paths in a tree that end as a path of `own` does, with that one.

    The collection does not count: a method may store parameters without it.
    """
    ends, paths = ([path for path, _ in leaves_of(one)] for one in (own, tree))
    return {path: end for path in paths for end in ends if path[skip - len(end) :] == end[skip:]}


def with_own(tree: PyTree, own: PyTree, skip: int = 1) -> PyTree:
    """The tree with a client's own layers in every model in it, stacked ones too."""
    where, leaves = _found(tree, own, skip), dict(leaves_of(own))

    def put(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaves[where[path]], leaf.shape) if path in where else leaf

    return map_with_path(put, tree)


def private_layers(
    model: Any, federation: Federation, data: FederatedData, layers: Collection[str]
) -> Transform:
    """These layers of `model` are trained with the rest and never shared.

    Args:
      data: only its shapes matter.
    """
    own_shapes, _ = trees.split(common.shapes(model, federation), layers)

    def first(member: Algorithm, key: jax.Array, state: State, start: State | None) -> PyTree:
        if start is not None and isinstance(start.clients, Client):
            return start.clients.own
        one, _ = trees.split(common.initial(model, federation, key, start), layers)
        return trees.repeat(one, federation.clients)

    def wrap(member: Algorithm) -> Algorithm:
        def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
            mine = with_own(payload, client.own)
            method = with_own(client.method, client.own, 0)  # models, and no momentum of theirs
            trained = member.train(mine, method, ctx)
            where, values = _found(trained.upload, own_shapes), dict(leaves_of(trained.upload))
            new = {end: values[path] for path, end in where.items()}
            own = map_with_path(lambda end, old: new.get(end, old), client.own)
            upload = map_with_path(
                lambda path, new, old: old if path in where else new,
                trained.upload,
                trees.matching_download(payload, trained.upload),
            )
            return trained._replace(upload=upload, client=Client(trained.client, own))

        def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
            server, rows = (with_own(part, client.own) for part in (state.server, state.rows))
            method = with_own(client.method, client.own, 0)
            return member.personalize(State(server, rows, ()), method, ctx)

        def traffic(payload: PyTree, upload: PyTree) -> Traffic:
            bill = member.traffic(payload, upload)
            return Traffic(
                *({name: b for name, b in way.items() if name not in layers} for way in bill)
            )

        return member._replace(train=train, personalize=personalize, traffic=traffic)

    def transform(algorithm: Algorithm) -> Algorithm:
        if has_groups(algorithm):
            raise UsageError("keep_head is for one architecture; use it without groups")
        if not _shares(algorithm, own_shapes, data):
            return algorithm
        # A client reads its own head in all rows, which takes arrays.
        return keeping(algorithm, Client, first, wrap)._replace(offload=())

    return transform


def _asked_for(value_of: Callable[[str], Any], around: Around) -> Transform | None:
    if not value_of("keep_head"):
        return None
    return private_layers(around.model, around.federation, around.data, {around.model.head})


KEEP_HEAD = Selectable(
    "Method and model",
    {
        "keep_head": Setting(
            False,
            "Keep the last layer on each client, whatever the method.",
            per_phase=True,
            tunable=True,
        )
    },
    _asked_for,
)


def _shares(algorithm: Algorithm, own: PyTree, data: FederatedData) -> bool:
    """Whether a client would upload these layers, of one model of the network that is stored."""
    key, i = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)

    def ctx(key: jax.Array, i: jax.Array) -> Any:
        state = algorithm.init(key)
        payload = algorithm.send(state._replace(clients=()), ClientContext(i, None, i, key))
        here = ClientContext(i, client_data(data, i), i, key)
        upload, trained, *_ = algorithm.train(payload, trees.row(state.clients, i), here)
        return payload, upload, trained, (state.server, state.rows)

    payload, upload, trained, stored = jax.eval_shape(ctx, key, i)
    names = set(trees.layers(own))
    if names <= set(trees.layers(trained)) and not names & set(trees.layers(upload)):
        return False  # as factorized_fl, whose head has factors and never travels

    def whole(tree: PyTree) -> dict[str, tuple[int, ...]]:
        found = _found(tree, own, 0)
        return {str(path): leaf.shape for path, leaf in leaves_of(tree) if path in found}

    like = {str(path): leaf.shape for path, leaf in leaves_of(own)}
    served = whole(trained) == like
    shared = bool(_found(upload, own))
    if not served or (
        shared and not (like.items() <= whole(payload).items() and _found(stored, own))
    ):
        raise UsageError(
            "keep_head is for methods that share one model of the network, which this one is not; "
            "leave it off (pfedhn_pc keeps the head by itself)"
        )
    return shared
