"""A node's own JSON file: its data, the words that may leave it, and the code that it runs.

    {"client": 0, "dataset": "csv:/data/amsterdam.csv", "csv": {"label": "outcome"},
     "labels": ["no", "yes"]}

Everything that concerns the node's examples stands here; no request can name or change it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl import data
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import schema
from fedjax_pfl.deploy.vocabulary import Vocabulary
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import settings_with

# Settings of a simulation's whole federation, which a request may have too.
SHARED = ("clients", "held_out")
# Settings that only a node's own file may have: who holds what, and where it lies.
_ROWS = (*(name for name in settings_with("defines_data") if name not in SHARED), "data_dir")
OF_DATA = frozenset({*_ROWS, *configuration.PARTITIONS, *configuration.DATASETS})
_OF_PARTITION = frozenset({*SHARED, "partition", "permute_labels", *configuration.PARTITIONS})


class NodeFile(NamedTuple):
    """Decisions of a node's owner.

    data: settings of the examples, such as `dataset`. With `clients` the node takes one client's
      part of a shared dataset, otherwise all examples of its own files.
    client: its number; None: the first request says it, and the node keeps it.
    labels, words: the classes of the label, and the words of each input column of text; a number
      says how many classes there are, or how many places words are hashed to.
    least_rows: rows that sums need before they leave the node.
    code: user-defined methods, networks and tasks that it runs, as MODULE:NAME.
    """

    data: Mapping[str, Any]
    client: int | None = None
    labels: Vocabulary | None = None
    words: Mapping[str, Vocabulary] = {}
    least_rows: int = schema.LEAST_ROWS
    code: tuple[str, ...] = ()


def read(path: Path) -> NodeFile:
    """Reads a node's file; UsageError where it is none."""
    return parsed(json_object(path), str(path))


def json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, which `parsed` checks."""
    try:
        found = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} must be an object")
    return found


def parsed(content: Any, where: str) -> NodeFile:
    """Checks the content of a node's file."""
    own = schema.NODE_FILE_OWN
    settings = dict.fromkeys((*OF_DATA, *SHARED), schema.Settings())
    try:
        schema.check(schema.Fields({"dataset": schema.Settings()}, {**settings, **own}), content,
                     where)  # fmt: skip
    except schema.InvalidError as error:
        raise UsageError(str(error)) from None
    mine = {name: value for name, value in content.items() if name not in own}
    if "clients" not in mine and (extra := sorted(set(mine) & _OF_PARTITION)):
        raise UsageError(f"{where} has {extra[0]}, which needs clients: how many share the dataset")
    if "clients" in mine and "client" not in content:
        raise UsageError(f"{where} has clients; say which of them the node is, as client")
    kept = {data.source_name(str(mine["dataset"])), str(mine.get("partition", "classes"))}
    groups = set(configuration.DATASETS) | set(configuration.PARTITIONS)
    if other := sorted((set(mine) & groups) - kept):
        raise UsageError(f"{where} has settings of {other[0]}, which its dataset does not use")
    for name, listed in {"labels": content.get("labels"), **content.get("words", {})}.items():
        if isinstance(listed, list) and len(set(listed)) < len(listed):
            raise UsageError(f"{where} states a word of {name} twice; state each once")
    settings = tuples(mine)
    try:
        configuration.specify(configuration.complete(settings))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    rest = {name: content[name] for name in own if name in content}
    rest["code"] = tuple(rest.get("code", ()))
    return NodeFile(data=settings, **rest)


def tuples(plain: Any) -> Any:
    """JSON with tuples in place of lists, as settings have them."""
    if isinstance(plain, dict):
        return {key: tuples(value) for key, value in plain.items()}
    return tuple(map(tuples, plain)) if isinstance(plain, list) else plain
