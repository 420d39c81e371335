"""The server's side of enrolment: from what each node says of its examples to the federation.

What a node says is checked before it is kept. A node that says something wrong, or something else
than most others, is refused and asked again.
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

_MOST_BYTES = 16_000_000  # of an answer


def request(run: str, i: int, settings: Mapping[str, Any], start: int) -> bytes:
    """Returns the request that client i enrol in a run."""
    facts = {"kind": ENROL, "run": run, "client": i, "settings": settings}
    return wire.encode(facts, envelope={"start": start})


def take(asked: bytes, content: bytes) -> dict[str, Any]:
    """Reads what a node says of its examples; raises InvalidError for anything else."""
    sent = wire.decode(asked, len(asked))
    answer = wire.decode(content, _MOST_BYTES, schema.ANSWER)
    if "why" in answer.facts:
        raise InvalidError(f"it has refused: {answer.facts['why']}")
    wanted = {word: sent.facts[word] for word in ("kind", "run", "client")}
    wanted["request"] = sent.digest
    if any(answer.facts[word] != value for word, value in wanted.items()) or answer.arrays:
        raise InvalidError("it answers another request")
    described = answer.facts["described"]
    _check_together(described)
    return described


def _check_together(described: Mapping[str, Any]) -> None:
    """Checks what no form says of one value alone."""
    counts, widths, shape = (described[k] for k in ("counts", "widths", "input_shape"))
    for word in counts:
        _need(counts[word] <= widths[word], f"counts.{word} is more than widths.{word}")
    shapes = [shape, described["each"], described["target"][1]]
    shapes += [constant[1] for constant in described["constants"].values()]
    for dims in shapes:
        _need(math.prod(dims) <= schema.MOST_ELEMENTS, "a shape has too many elements")
    if "classes" in described:
        names = described["classes"]
        _need(len(set(names)) == len(names) == described["outputs"], "outputs are not its classes")
    _need(("sums" in described) == ("normalise" in described), "it has sums without columns")
    if "sums" in described:
        sums, wanted = described["sums"], described["normalise"]
        positions = math.prod(shape[:-1])
        width = sum(wanted["features"]) + wanted["targets"] * math.prod(described["target"][1])
        _need(
            len(wanted["features"]) == shape[-1]
            and len(sums["mean"]) == len(sums["m2"]) == width
            and sums["n"] == counts["train"] * positions,
            "its sums are not of its training examples",
        )


def _need(condition: bool, line: str) -> None:
    if not condition:
        raise InvalidError(line)


def alike(described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what all nodes must say alike."""
    names = (*schema.ALIKE, *schema.ALIKE_OPTIONAL)
    return {name: described[name] for name in names if name in described}


def differing(described: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Returns, by client, how it differs from most others, or from client 0 where none are most."""
    texts = {i: json.dumps(alike(described[i]), sort_keys=True) for i in sorted(described)}
    ((usual, _),) = Counter(texts.values()).most_common(1)
    wanted, first = json.loads(usual), next(i for i in texts if texts[i] == usual)
    lines = {}
    for i, text in texts.items():
        if text != usual:
            mine = json.loads(text)
            names = (*schema.ALIKE, *schema.ALIKE_OPTIONAL)
            name = next(name for name in names if mine.get(name) != wanted.get(name))
            lines[i] = f"its {name} differs from that of client {first}; all nodes need the same"
    return lines


def agreed(described: Mapping[int, Mapping[str, Any]], settings: ConfigDict) -> dict[str, Any]:
    """Returns the description of the federation, of nodes that say alike what they must."""
    each = [described[i] for i in sorted(described)]
    federation = {
        "counts": [one["counts"] for one in each],
        "held_out": settings.held_out,
        "groups": max(1, len(settings.groups)),
        "alike": alike(each[0]),
        "widths": each[0]["widths"],
        "stored_dtype": each[0]["stored_dtype"],
        **(_moments([one["sums"] for one in each]) if "sums" in each[0] else {}),
    }
    schema.check(schema.FEDERATION, federation, "federation")
    return federation


def _moments(sums: list[Any]) -> dict[str, Any]:
    """Mean and deviation over all nodes' training examples, from n, mean and M2 of each."""
    n = np.array([one["n"] for one in sums], np.float64)[:, None]
    means, m2 = (np.array([one[k] for one in sums], np.float64) for k in ("mean", "m2"))
    mean = (n * means).sum(0) / n.sum()
    deviation = np.sqrt((m2 + n * np.square(means - mean)).sum(0) / n.sum())
    least = np.maximum(1e-12 * np.abs(mean), 1 / schema.LARGEST)
    deviation = np.where(deviation > least, deviation, 1.0)
    return {"mean": mean.tolist(), "deviation": deviation.tolist()}


def enrol(
    run: str,
    start: int,
    settings: ConfigDict,
    sent: Mapping[str, Any],
    ask: Callable[[dict[int, bytes]], Any],
    tries: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Asks all clients until each has enrolled, and returns the description of the federation.

    Args:
      sent: the settings that nodes are sent.
      ask: sends requests and yields (client, answer).
    """
    described: dict[int, dict[str, Any]] = {}
    for _ in range(tries):
        left = [i for i in range(settings.clients) if i not in described]
        requests = {i: request(run, i, sent, start) for i in left}
        for i, content in ask(requests):
            try:
                described[i] = take(requests[i], content)
            except InvalidError as error:
                tell(f"client {i} cannot enrol: {error}")
        for i, line in (differing(described) if described else {}).items():
            tell(f"client {i} cannot enrol: {line}")
            del described[i]
        if len(described) == settings.clients:
            try:
                return agreed(described, settings)
            except InvalidError as error:
                raise UsageError(f"what the nodes say together is out of bounds: {error}") from None
    absent = sorted(set(range(settings.clients)) - set(described))
    raise UsageError(
        f"{len(absent)} of {settings.clients} clients have not enrolled, the first is client "
        f"{absent[0]}; start their nodes and give the same command again"
    )
