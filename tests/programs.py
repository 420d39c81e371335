"""Facts read from the text of a compiled program."""

import math
import re


def collectives(text: str) -> set[str]:
    """Returns the kinds of communication between devices."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-[a-z]+|ragged-all-to-all"
    return set(re.findall(rf" ({kinds})(?:-start)?\(", text))


def all_gathered(text: str) -> int:
    """Returns the bytes of the results of all all-gathers."""
    return _results(text, "all-gather")


def moved(text: str) -> int:
    """Returns the bytes of the results of all communication between devices."""
    return sum(_results(text, kind) for kind in collectives(text))


def _results(text: str, kind_of_operation: str) -> int:
    total = 0
    for line in text.splitlines():
        if match := re.search(rf" = (.*) {kind_of_operation}\(", line):
            for kind, bits, shape in re.findall(r"(pred|[a-z]+(\d+))\[([\d,]*)\]", match[1]):
                size = math.prod(int(n) for n in shape.split(",") if n)
                total += size * (1 if kind == "pred" else int(bits) // 8)
    return total
