"""What a compiled program says of itself."""

import math
import re


def collectives(text: str) -> set[str]:
    """All kinds of operations in which devices send each other something."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-[a-z]+|ragged-all-to-all"
    return set(re.findall(rf" ({kinds})(?:-start)?\(", text))


def all_gathered(text: str) -> int:
    """Bytes of the results of all all-gathers of a compiled program."""
    return _results(text, "all-gather")


def moved(text: str) -> int:
    """Bytes of the results of all operations in which devices send each other something."""
    return sum(_results(text, kind) for kind in collectives(text))


def _results(text: str, kind_of_operation: str) -> int:
    total = 0
    for line in text.splitlines():
        if found := re.search(rf" = (.*) {kind_of_operation}\(", line):
            for kind, bits, shape in re.findall(r"(pred|[a-z]+(\d+))\[([\d,]*)\]", found[1]):
                size = math.prod(int(n) for n in shape.split(",") if n)
                total += size * (1 if kind == "pred" else int(bits) // 8)
    return total
