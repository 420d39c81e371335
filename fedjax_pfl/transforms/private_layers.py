"""Private layers: each client trains and keeps some layers, such as the head.

In every model that a client downloads or that the server stores, the client's own values replace
those of the private layers. In uploads, the downloaded values replace them, so the server learns
nothing about them and averages equal values. They count as no traffic. Models that a method stores
on the client get the client's trained layers if they had the ones before, as FedFomo's latest start
has. A personal model that trains its own layers, as in Ditto, APFL and FML, keeps these.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from fedjax_pfl.algorithms.shared.initial_state import initial_variables, model_shapes
from fedjax_pfl.core import jaxprs, trees
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
from fedjax_pfl.transforms.wrapping import (
    Selectable,
    Transform,
    TransformContext,
    round_shapes,
    with_client_state,
    without_records,
)

Path = tuple[Any, ...]


class Client(NamedTuple):
    """Client-side state of the method, and the private layers."""

    method: PyTree  # client-side state of the method
    own: PyTree  # variables of the private layers


def _matching_paths(
    tree: PyTree, private: PyTree, others: PyTree = (), skip: int = 1
) -> dict[Path, Path]:
    """Returns a dict: path in `tree` -> the path in `private` that it ends with.

    Args:
      tree: Any tree with models in it.
      private: Variables of the private layers.
      others: Variables of the other layers. A path that ends with a longer one of theirs, such as
        Block_0/Dense_0/kernel, does not match Dense_0/kernel.
      skip: Entries at the start of a private path to ignore. With 1 the collection is ignored,
        because a method may store parameters without it.
    """
    private_paths, other_paths, paths = (
        [path for path, _ in tree_leaves_with_path(variables)]
        for variables in (private, others, tree)
    )

    def ends_with(path: Path, layer_path: Path) -> bool:
        return path[skip - len(layer_path) :] == layer_path[skip:]

    return {
        path: private_path
        for path in paths
        for private_path in private_paths
        if ends_with(path, private_path)
        and not any(
            len(other_path) > len(private_path) and ends_with(path, other_path)
            for other_path in other_paths
        )
    }


def replace_layers(tree: PyTree, private: PyTree, others: PyTree = ()) -> PyTree:
    """Returns `tree` with the values of `private` in each of its models, stacked ones included.

    Args:
      tree: Any tree with models in it.
      private: Variables of the private layers of one client.
      others: Variables or shapes of the other layers.
    """
    matches = _matching_paths(tree, private, others)
    leaves = dict(tree_leaves_with_path(private))

    def replace(path: Path, leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaves[matches[path]], leaf.shape) if path in matches else leaf

    return tree_map_with_path(replace, tree)


def _update_stored(stored: PyTree, old: PyTree, new: PyTree) -> PyTree:
    """Returns a client's state with `new` private layers in each of its models that has the `old`.

    Args:
      stored: Client-side state of the method after training.
      old: The client's private layers before training.
      new: The same after training.
    """
    # With skip=0 only whole models match, not their momentum.
    matches = _matching_paths(stored, old, skip=0)
    leaves = dict(tree_leaves_with_path(stored))
    old_leaves, new_leaves = (dict(tree_leaves_with_path(tree)) for tree in (old, new))
    equal: dict[Path, jax.Array] = {}  # by model: whether all its private layers are the old ones
    for path, private_path in matches.items():
        place = path[: -len(private_path)]
        leaf = leaves[path]
        is_old = jnp.all(leaf == jnp.broadcast_to(old_leaves[private_path], leaf.shape))
        equal[place] = equal.get(place, True) & is_old

    def update(path: Path, leaf: jax.Array) -> jax.Array:
        if path not in matches:
            return leaf
        private_path = matches[path]
        new_leaf = jnp.broadcast_to(new_leaves[private_path], leaf.shape)
        return jnp.where(equal[path[: -len(private_path)]], new_leaf, leaf)

    return tree_map_with_path(update, stored)


def private_layers(
    model: Any, federation: Federation, data: FederatedData, layers: Collection[str]
) -> Transform:
    """Returns a transform with which each client keeps its own values of some layers.

    Args:
      model: The network.
      federation: Clients and task.
      data: Examples; only their shapes matter.
      layers: Names of the private layers.
    """
    private_shapes, other_shapes = trees.split(model_shapes(model, federation), layers)

    def shared_only(counts: Mapping[str, Any], message: PyTree) -> dict[str, Any]:
        """Returns the counts of layers without those of `message` that clients replace."""
        paths = _matching_paths(message, private_shapes, other_shapes)
        private = {*layers, *map(trees.layer_name, paths)}
        return {name: count for name, count in counts.items() if name not in private}

    def first(member: Algorithm, key: jax.Array, state: State, start: State | None) -> PyTree:
        # The earlier phase may have had transforms that this one does not have.
        record: Any = start and start.clients
        while hasattr(record, "method") and not isinstance(record, Client):
            record = record.method
        if isinstance(record, Client):
            return record.own
        start = start and start._replace(server=without_records(start.server))
        private, _ = trees.split(initial_variables(model, federation, key, start), layers)
        return trees.repeat(private, federation.clients)

    def wrap(member: Algorithm) -> Algorithm:
        def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
            client_payload = replace_layers(payload, client.own, other_shapes)
            result = member.train(client_payload, client.method, ctx)
            matches = _matching_paths(result.upload, private_shapes, other_shapes)
            values = dict(tree_leaves_with_path(result.upload))
            trained = {private_path: values[path] for path, private_path in matches.items()}
            private = tree_map_with_path(
                lambda path, old: trained[path].astype(old.dtype) if path in trained else old,
                client.own,
            )
            upload = tree_map_with_path(
                lambda path, new, old: old if path in matches else new,
                result.upload,
                trees.matching_download(payload, result.upload),
            )
            stored = _update_stored(result.client, client.own, private)
            return result._replace(upload=upload, client=Client(stored, private))

        def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
            server, rows = replace_layers((state.server, state.rows), client.own, other_shapes)
            return member.personalize(State(server, rows, ()), client.method, ctx)

        def traffic(payload: PyTree, upload: PyTree) -> Traffic:
            counts = member.traffic(payload, upload)
            return Traffic(shared_only(counts.down, payload), shared_only(counts.up, upload))

        def kept_change(payload: PyTree, client: Client, ctx: ClientContext) -> Any:
            client_payload = replace_layers(payload, client.own, other_shapes)
            return member.kept_change(client_payload, client.method, ctx)

        share = kept_change if callable(member.kept_change) else member.kept_change
        return member._replace(
            train=train, personalize=personalize, traffic=traffic, kept_change=share
        )

    def transform(algorithm: Algorithm) -> Algorithm:
        if has_groups(algorithm):
            raise UsageError("keep_head is for one architecture; use it without groups")
        if not _is_shared(algorithm, private_shapes, other_shapes, data):
            return algorithm
        # A client replaces the layers in all rows, so the rows must be arrays on the device.
        return with_client_state(algorithm, Client, first, wrap)._replace(offload=())

    return transform


def _make(value_of: Callable[[str], Any], context: TransformContext) -> Transform | None:
    """Returns the transform, or None if the setting keep_head is False.

    `value_of` returns the value of a setting by its name.
    """
    layers = kept_layers(value_of, context.model)
    if not layers:
        return None
    return private_layers(context.model, context.federation, context.data, layers)


def kept_layers(value_of: Callable[[str], Any], model: Any) -> set[str]:
    """Returns the layers that the setting keep_head keeps on each client, none by default.

    `value_of` returns the value of a setting by its name.
    """
    return {model.head} if value_of("keep_head") else set()


KEEP_HEAD = Selectable(
    "Method and model",
    {
        "keep_head": Setting(
            False,
            "Keep the last layer on each client, with methods that share one model.",
            roles={"per_phase", "tunable"},
        )
    },
    _make,
)


def _is_shared(algorithm: Algorithm, private: PyTree, others: PyTree, data: FederatedData) -> bool:
    """Returns True if clients upload the private layers, False if they keep them by themselves.

    Raises UsageError if they do neither, if the payload, the trained model and the stored model are
    not one model of the network, or if the payload has other values of the private layers, such as
    SCAFFOLD's control variates, which are not a client's own.

    Args:
      algorithm: The algorithm, without groups.
      private: Shapes of the private layers.
      others: Shapes of the other layers.
      data: Examples; only their shapes matter.
    """
    state, payload, upload, variables = round_shapes(algorithm, data)
    names = set(trees.layers(private))
    is_own = names <= set(trees.layers(variables)) and not names & set(trees.layers(upload))
    if is_own and _are_stored(algorithm, state, names, data):
        return False  # such as factorized_fl, whose factorized head is never uploaded

    def private_part(tree: PyTree) -> dict[str, tuple[int, ...]]:
        matches = _matching_paths(tree, private, skip=0)
        return {
            str(path): leaf.shape for path, leaf in tree_leaves_with_path(tree) if path in matches
        }

    if names and set(trees.layers(upload)) == names:
        raise UsageError(
            f"keep_head keeps {', '.join(sorted(names))}, and the method uploads nothing else; "
            "leave it off, or share more layers"
        )
    shapes = {str(path): leaf.shape for path, leaf in tree_leaves_with_path(private)}
    is_shared = bool(_matching_paths(upload, private, others))
    is_sent_and_stored = shapes.items() <= private_part(payload).items() and bool(
        _matching_paths((state.server, state.rows), private, others)
    )
    matches, models = (_matching_paths(payload, private, others, skip) for skip in (1, 0))
    other = set(matches) - set(models)
    if other:
        raise UsageError(
            "keep_head is for methods that send models alone, and this one sends the head's "
            f"{jax.tree_util.keystr(min(other, key=str))} as well; leave it off"
        )
    if private_part(variables) != shapes or not (is_shared and is_sent_and_stored):
        raise UsageError(
            "keep_head is for methods that share one model of the network, which this one is not; "
            "leave it off (pfedhn_pc keeps the head by itself)"
        )
    return True


def _are_stored(
    algorithm: Algorithm, state: State, names: Collection[str], data: FederatedData
) -> bool:
    """Returns True if clients keep the layers `names` of their personalised models.

    `algorithm` has no groups. Of `state` and `data`, only shapes matter.
    """
    number, key = jnp.int32(0), jax.random.key(0)

    def stored(clients: PyTree, shared: State, data: FederatedData) -> PyTree:
        ctx = ClientContext(i=number, data=client_data(data, number), t=number, key=key)
        variables = algorithm.personalize(shared, trees.row(clients, number), ctx)
        return trees.split(variables, names)[0]

    return jaxprs.depends_on(stored, state.clients, state._replace(clients=()), data)
