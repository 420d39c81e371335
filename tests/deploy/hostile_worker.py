"""Hostile worker: python -m tests.deploy.hostile_worker FOLDER NODE.json"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.deploy import node, node_file, wire, worker

INJECTED = "sorry\nThe run has ended: /srv\nerror: gone\x1b[2J"
request_counts = {"enrol": 0, "train": 0, "evaluate": 0}


def lie(worker_node: node.Node, content: bytes) -> bytes:
    """Returns a wrong response to the first enrolments and to all rounds and evaluations."""
    response = node.respond(worker_node, content)
    message = wire.decode(response, len(response))
    kind = message.facts["kind"]
    if kind == "refused":
        return response
    request_counts[kind] += 1
    facts: dict[str, Any] = dict(message.facts)
    trees: dict[str, dict[str, Any]] = {}
    for name, array in message.arrays.items():
        group, _, path = name.partition("/")
        trees.setdefault(group, {})[path] = array
    if kind == "enrol":
        if request_counts[kind] == 1:
            return wire.encode({"kind": "refused", "why": INJECTED})
        if request_counts[kind] == 2:
            facts["described"] = {**facts["described"], "counts": {"train": "many"}}
    elif kind == "train":
        huge = np.float32(1e37 if request_counts[kind] == 1 else np.nan)
        trees["upload"] = {n: np.full_like(leaf, huge) for n, leaf in trees["upload"].items()}
    else:
        scores = trees["scores"]
        scores |= {n: np.float32(1e9) for n in scores if n.startswith("before/metrics/")}
    return wire.encode(facts, trees)


if __name__ == "__main__":
    worker.respond = lie
    worker.serve(node.Node(Path(sys.argv[1]), node_file.read(Path(sys.argv[2]))))
