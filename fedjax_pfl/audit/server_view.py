"""A client's network as the server sees it in one round: downloaded values and their changes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, PyTree

_PARAMS = "['params']"


class ServerView(NamedTuple):
    """Arrays by their path in the variables of a network, written as by `jax.tree_util.keystr`.

    Paths that the server lacks are absent.

    An uploaded value is its start, or 0 without one, plus its change.
    """

    start: dict[str, jax.Array]  # downloaded values
    change: dict[str, jax.Array]  # uploaded values minus downloaded ones, as they arrive

    def uploaded(self, variables: PyTree, head: str = "") -> PyTree | None:
        """Returns the uploaded network, shaped like `variables`, or None if parts are missing.

        The layer `head` may be missing; it is 0 then.
        """

        def value(path: Any, leaf: Any) -> jax.Array:
            place = keystr(path)
            if place not in self.change:
                return jnp.zeros(leaf.shape, leaf.dtype)
            return self.start.get(place, 0.0) + self.change[place]

        leaves = tree_leaves_with_path(variables)
        missing = {trees.layer_name(p) for p, _ in leaves if keystr(p) not in self.change}
        return None if missing - {head} else tree_map_with_path(value, variables)


def by_path(tree: PyTree) -> dict[str, jax.Array]:
    """Returns the leaves of a tree by their path."""
    return {keystr(path): leaf for path, leaf in tree_leaves_with_path(tree)}


def server_view(
    member: Algorithm, payload: PyTree, upload: PyTree, variables: PyTree
) -> ServerView:
    """Returns the parts of a network that are in a download and in an upload.

    An uploaded array that was not downloaded counts only under its path in the network: the change
    that PeFLL uploads is no model.

    Args:
      member: The algorithm of the client's group.
      payload: The download.
      upload: The upload, after compression and noise.
      variables: Variables of the network; only paths and shapes matter.
    """
    change = by_path(trees.change(payload, upload))
    model_paths = by_path(payload).keys() | by_path(variables).keys()
    sent = {
        path: change[path] for path in sent_paths(member, payload, upload) if path in model_paths
    }
    return ServerView(start=_find(by_path(payload), variables), change=_find(sent, variables))


def uploaded_means(upload: PyTree, shape: tuple[int, int]) -> jax.Array | None:
    """Returns the mean features of each class in an upload, or None if it has none.

    They are its only array of this shape, [classes, features], outside of the network.
    """
    arrays = [
        leaf
        for path, leaf in tree_leaves_with_path(upload)
        if len(path) == 1 and leaf.shape == shape and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return arrays[0] if len(arrays) == 1 else None


def sent_paths(member: Algorithm, payload: PyTree, upload: PyTree) -> tuple[str, ...]:
    """Returns the paths of the floating-point arrays of an upload that are sent.

    Layers without uploaded bytes, such as a private head, are not sent.
    """
    bytes_up = member.traffic(payload, upload).up
    return tuple(
        keystr(path)
        for path, leaf in tree_leaves_with_path(upload)
        if int(bytes_up.get(trees.layer_name(path), 0)) > 0
        and jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def private_paths(
    member: Algorithm, payload: PyTree, upload: PyTree, client: PyTree, variables: PyTree
) -> dict[str, str]:
    """Returns the parameters of a network that the server lacks, by their path in `client`.

    Values are paths in `variables`. The download has no value of these parameters that is sent in
    either direction; a private head is an example.

    Args:
      member: The algorithm of the client's group.
      payload: The download.
      upload: The upload.
      client: Client-side state.
      variables: Variables of the network; only paths and shapes matter.
    """
    traffic = member.traffic(payload, upload)
    sent = {
        keystr(path): leaf
        for path, leaf in tree_leaves_with_path(payload)
        if any(int(count.get(trees.layer_name(path), 0)) > 0 for count in traffic)
    }
    missing = by_path(variables).keys() - _find(sent, variables).keys()
    shapes = {path: leaf.shape for path, leaf in by_path(variables).items()}
    return {
        place: path
        for place, leaf in by_path(client).items()
        for path in sorted(missing)
        if path.startswith(_PARAMS) and place.endswith(path) and leaf.shape == shapes[path]
    }


def _find(leaves: dict[str, jax.Array], variables: PyTree) -> dict[str, jax.Array]:
    """Returns the leaf for each path of `variables`: of this path, else of one that ends with it.

    The collection at the start of a path, such as params, need not match. Shapes must be equal.
    """
    floating = {p: leaf for p, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    matches = {}
    for path, value in by_path(variables).items():
        in_collection = path[path.index("]") + 1 :]
        ends_alike = [p for p in floating if p.endswith(in_collection)]
        for candidate in [path, *ends_alike]:
            if candidate in floating and floating[candidate].shape == value.shape:
                matches[path] = floating[candidate]
                break
    return matches
