"""Enrolment at the server: builds the federation's description from the nodes' descriptions.

Each node's description is checked before it is stored. A node with an invalid description, or one
that disagrees with most other nodes, is refused and gets the request again.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import schema, wire
from fedjax_pfl.deploy.schema import ENROL, InvalidError

_MAX_RESPONSE_BYTES = 16_000_000


def request(run: str, i: int, settings: Mapping[str, Any], start: int) -> bytes:
    """Encodes the request that client `i` enrols in a run; `start` is the number of its start.

    `settings` are those that affect training, see `assembly.node_settings`.
    """
    facts = {"kind": ENROL, "run": run, "client": i, "settings": settings}
    return wire.encode(facts, envelope={"start": start})


def read_description(request: bytes, content: bytes) -> dict[str, Any]:
    """Decodes a node's description of its examples from its response to a request to enrol.

    Both `request` and the response `content` are encoded.
    Returns the fields of `schema.NODE_DESCRIPTION`: the number of examples for training, validation
    and testing, and the shapes, dtypes and class names of the examples.
    Raises InvalidError if the response refuses, does not answer the request or is inconsistent.
    """
    expected = wire.response_facts(wire.decode(request, len(request)))
    response = wire.read_response(content, _MAX_RESPONSE_BYTES, expected)
    wire.check_array_groups(response)
    _check_consistency(response.facts["described"])
    return response.facts["described"]


def _check_consistency(described: Mapping[str, Any]) -> None:
    """Checks conditions between fields of a node's description, which `schema` cannot express.

    Raises InvalidError if one does not hold.
    """
    counts, widths, shape = (described[k] for k in ("counts", "widths", "input_shape"))
    for split in counts:
        _need(counts[split] <= widths[split], f"counts.{split} is more than widths.{split}")
    shapes = [shape, described["each"], described["target"][1]]
    shapes += [constant[1] for constant in described["constants"].values()]
    for dims in shapes:
        _need(math.prod(dims) <= schema.MAX_ELEMENTS, "a shape has too many elements")
    if "classes" in described:
        names = described["classes"]
        _need(len(set(names)) == len(names) == described["outputs"], "outputs are not its classes")
    _need(("sums" in described) == ("normalise" in described), "it has sums without columns")
    if "sums" in described:
        sums, normalised = described["sums"], described["normalise"]
        positions = math.prod(shape[:-1]) if any(normalised["features"]) else 1
        width = sum(normalised["features"]) + normalised["targets"] * math.prod(
            described["target"][1]
        )
        _need(
            len(normalised["features"]) == shape[-1]
            and len(sums["mean"]) == len(sums["m2"]) == width
            and sums["n"] == counts["train"] * positions,
            "its sums are not of its training examples",
        )


def _need(condition: bool, line: str) -> None:
    """Raises InvalidError with the message `line` if the condition is false."""
    if not condition:
        raise InvalidError(line)


def find_disagreements(described: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Returns an error line for each client whose shared fields differ from the most frequent ones.

    `described` and the result are by client id. With a tie, the fields of the client with the
    lowest id count.
    """
    fields = {i: schema.shared_fields(described[i]) for i in sorted(described)}
    texts = {i: json.dumps(fields[i], sort_keys=True) for i in fields}
    ((usual_text, _),) = Counter(texts.values()).most_common(1)
    first = next(i for i in texts if texts[i] == usual_text)
    lines = {}
    for i, text in texts.items():
        if text != usual_text:
            names = [n for n in schema.SHARED_NAMES if fields[i].get(n) != fields[first].get(n)]
            lines[i] = (
                f"its {names[0]} differs from that of client {first}; all nodes need the same"
            )
    return lines


def build_federation(
    described: Mapping[int, Mapping[str, Any]], settings: ConfigDict
) -> dict[str, Any]:
    """Builds the federation's description from the nodes' descriptions, whose shared fields agree.

    `described` has a node's description by client id. Returns the fields of `schema.FEDERATION`,
    such as the number of examples of each client.
    """
    descriptions = [described[i] for i in sorted(described)]
    federation = {
        "counts": [description["counts"] for description in descriptions],
        "held_out": settings.held_out,
        "groups": max(1, len(settings.groups)),
        "alike": schema.shared_fields(descriptions[0]),
        "widths": descriptions[0]["widths"],
        "stored_dtype": descriptions[0]["stored_dtype"],
    }
    if "sums" in descriptions[0]:
        active = descriptions[: len(descriptions) - settings.held_out]  # as in a simulation
        federation |= _moments([description["sums"] for description in active])
    schema.FEDERATION(federation, "federation")
    return federation


def _moments(sums: list[Any]) -> dict[str, Any]:
    """Returns lists "mean" and "deviation" of each column over the training examples of nodes.

    The deviation of a constant column is 1.
    `sums` has each node's count `n`, and mean and sum of squared deviations `m2` of each column.
    """
    n = np.array([node_sums["n"] for node_sums in sums], np.float64)[:, None]
    means, m2 = (np.array([node_sums[k] for node_sums in sums], np.float64) for k in ("mean", "m2"))
    mean = (n * means).sum(0) / n.sum()
    deviation = np.sqrt((m2 + n * np.square(means - mean)).sum(0) / n.sum())
    least = np.maximum(1e-12 * np.abs(mean), 1 / schema.MAX_MEAN)
    deviation = np.where(deviation > least, deviation, 1.0)
    return {"mean": mean.tolist(), "deviation": deviation.tolist()}


def enrol(
    run: str,
    start: int,
    settings: ConfigDict,
    node_settings: Mapping[str, Any],
    send_requests: Callable[[dict[int, bytes]], Any],
    wait_for_return: Callable[[list[int]], None],
    tries: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Sends requests until all clients have enrolled; returns the federation's description.

    Args:
      run: Name of the run.
      start: Number of the server's start, larger than that of each earlier start.
      settings: Completed settings.
      node_settings: Settings that are sent to nodes.
      send_requests: Takes encoded requests by client id; yields pairs of client id and response.
      wait_for_return: Takes client ids; waits until one of those that are offline is online.
      tries: Number of attempts before UsageError is raised.
      log: Called with a line for each absent or refused node.
    """
    described: dict[int, dict[str, Any]] = {}
    missing = list(range(settings.clients))
    for attempt in range(tries):
        if attempt:
            wait_for_return(missing)
        requests = {i: request(run, i, node_settings, start) for i in missing}
        silent = set(missing)
        for i, content in send_requests(requests):
            silent.discard(i)
            try:
                described[i] = read_description(requests[i], content)
            except InvalidError as error:
                log(f"client {i} cannot enrol: {error}")
        for i, line in (find_disagreements(described) if described else {}).items():
            log(f"client {i} cannot enrol: {line}")
            del described[i]
        for i in sorted(silent):
            log(f"client {i} has not enrolled: it is offline or did not answer")
        missing = [i for i in range(settings.clients) if i not in described]
        if len(described) == settings.clients:
            try:
                return build_federation(described, settings)
            except InvalidError as error:
                raise UsageError(f"the combined description is out of bounds: {error}") from None
    raise UsageError(
        f"{len(missing)} of {settings.clients} clients have not enrolled, the first is client "
        f"{missing[0]}; start their nodes and run the same command again"
    )
