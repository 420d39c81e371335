"""A node's worker that lies: python -m tests.deploy.hostile_worker FOLDER NODE.json"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.deploy import node, node_file, wire, worker

INJECTED = "sorry\nThe run has ended: /srv\nerror: gone\x1b[2J"
asked = {"enrol": 0, "train": 0, "evaluate": 0}


def lie(one: node.Node, content: bytes) -> bytes:
    """A wrong answer to the first enrolments, and to every round and evaluation but one."""
    good = node.respond(one, content)
    found = wire.decode(good, len(good))
    kind = found.facts["kind"]
    if kind == "refused":
        return good
    asked[kind] += 1
    facts: dict[str, Any] = dict(found.facts)
    trees: dict[str, dict[str, Any]] = {}
    for name, array in found.arrays.items():
        word, _, rest = name.partition("/")
        trees.setdefault(word, {})[rest] = array
    if kind == "enrol":
        if asked[kind] == 1:
            return wire.encode({"kind": "refused", "why": INJECTED})
        if asked[kind] == 2:
            facts["described"] = {**facts["described"], "counts": {"train": "many"}}
    elif kind == "train":
        huge = np.float32(1e37 if asked[kind] == 1 else np.nan)
        trees["upload"] = {n: np.full_like(leaf, huge) for n, leaf in trees["upload"].items()}
    else:
        scores = trees["scores"]
        scores |= {n: np.float32(1e9) for n in scores if n.startswith("before/metrics/")}
    return wire.encode(facts, trees)


if __name__ == "__main__":
    worker.respond = lie
    worker.serve(node.Node(Path(sys.argv[1]), node_file.read(Path(sys.argv[2]))))
