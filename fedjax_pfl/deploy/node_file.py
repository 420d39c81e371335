"""A node's JSON file: its data, the words that may leave it, and the code that it may run.

    {"client": 0, "dataset": "csv:/data/amsterdam.csv", "csv": {"label": "outcome"},
     "labels": ["no", "yes"]}

Only this file decides about the node's examples. Requests cannot change them.
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

# Settings of the whole federation, which requests have too.
SHARED_SETTINGS = ("clients", "held_out")
# Settings that only a node's file may have: the source of the data and the partition.
_SOURCE_SETTINGS = (
    *(name for name in settings_with("defines_data") if name not in SHARED_SETTINGS),
    "data_dir",
)
DATA_SETTINGS = frozenset({*_SOURCE_SETTINGS, *configuration.PARTITIONS, *configuration.DATASETS})
_PARTITION_SETTINGS = frozenset(
    {*SHARED_SETTINGS, "partition", "permute_labels", *configuration.PARTITIONS}
)


class NodeFile(NamedTuple):
    """Content of a node's file.

    Attributes:
      data: Settings of the dataset. With `clients` the node uses one client's part of a shared
        dataset, otherwise all examples of its own files.
      client: Client id; None: the first enrolment decides.
      labels: Class names, or the number of classes.
      words: For each input column of text its words, or the number of values to hash them to.
      least_rows: Minimum number of training rows for sums that leave the node.
      code: User-defined methods, networks and tasks that the node may run, as MODULE:NAME.
    """

    data: Mapping[str, Any]
    client: int | None = None
    labels: Vocabulary | None = None
    words: Mapping[str, Vocabulary] = {}
    least_rows: int = schema.MIN_ROWS
    code: tuple[str, ...] = ()


def read(path: Path) -> NodeFile:
    """Reads and checks a node's file."""
    return parse(json_object(path), str(path))


def json_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object; raises UsageError if it does not."""
    try:
        content = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must be an object")
    return content


def parse(content: Any, path: str) -> NodeFile:
    """Builds a `NodeFile` from the JSON content of a node's file.

    Raises UsageError, which names `path`, if the content is invalid.
    """
    file_fields = schema.OWNER_FIELDS
    settings = dict.fromkeys((*DATA_SETTINGS, *SHARED_SETTINGS), schema.settings)
    try:
        schema.fields({"dataset": schema.settings}, {**settings, **file_fields})(content, path)
    except schema.InvalidError as error:
        raise UsageError(str(error)) from None
    data_settings = {name: value for name, value in content.items() if name not in file_fields}
    if "clients" not in data_settings and (
        extra := sorted(set(data_settings) & _PARTITION_SETTINGS)
    ):
        raise UsageError(f"{path} has {extra[0]}, which needs clients, the number of clients")
    if ":" not in str(data_settings["dataset"]) and (
        unused := [name for name in ("labels", "words") if name in content]
    ):
        raise UsageError(f"{path} has {unused[0]}, which only a file of the node needs; remove it")
    if "clients" in data_settings and "client" not in content:
        raise UsageError(f"{path} has clients but no client; add the client id of the node")
    used_groups = {
        data.source_name(str(data_settings["dataset"])),
        str(data_settings.get("partition", "classes")),
    }
    groups = set(configuration.DATASETS) | set(configuration.PARTITIONS)
    if unused := sorted((set(data_settings) & groups) - used_groups):
        raise UsageError(f"{path} has settings of {unused[0]}, which its dataset does not use")
    for name, vocabulary in {"labels": content.get("labels"), **content.get("words", {})}.items():
        if isinstance(vocabulary, list) and len(set(vocabulary)) < len(vocabulary):
            raise UsageError(f"{path} has a word of {name} twice; list each word once")
    settings = to_tuples(data_settings)
    try:
        configuration.specify(configuration.complete(settings))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    owner_fields = {name: content[name] for name in file_fields if name in content}
    owner_fields["code"] = tuple(owner_fields.get("code", ()))
    return NodeFile(data=settings, **owner_fields)


def to_tuples(content: Any) -> Any:
    """Converts lists in JSON data to tuples, which settings use."""
    if isinstance(content, dict):
        return {key: to_tuples(value) for key, value in content.items()}
    return tuple(map(to_tuples, content)) if isinstance(content, list) else content
