"""Whether our methods do what those of other libraries do: parameters after one and three rounds.

python -m experiments.agree --pfllib=CHECKOUT --fl_bench=CHECKOUT
                            --pfllib_python=PYTHON --fl_bench_python=PYTHON
                            --methods=fedrep,ditto --out=FILE.json

The same examples, the same first parameters, full batches, the same rates and numbers of steps: so
nothing is random, and what differs is the method. The libraries are run from checkouts that you
have, each in a process of its own, by a Python that has what they need. Each method ends as the
same, or as different and why. See docs/agreement.md.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments.launch import command
from experiments.outside import judged, ours
from experiments.outside.methods import METHODS, Theirs
from experiments.speed import rivals
from experiments.speed.rivals import Child, Gone
from fedjax_pfl.config import configuration
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import text_tables

LIBRARIES = ("pfllib", "fl_bench")


def of_theirs(
    library: str, start: Sequence[str], checkout: str, name: str, limit: float
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The work, and what a library made of it; Gone where it cannot."""
    method = METHODS[name]
    theirs: Theirs = getattr(method, library)
    given = ours.work(method.norm)
    with tempfile.TemporaryDirectory() as folder:
        work, out = Path(folder, "work.npz"), Path(folder, "out.npz")
        np.savez(work, **given)  # type: ignore[arg-type]
        spec = {
            "checkout": checkout,
            "algorithm": name,
            "work": str(work),
            "out": str(out),
            "rounds": ours.ROUNDS,
            "epochs": theirs.epochs,
            "rate": ours.RATE,
            "settings": dict(theirs.settings),
        }
        script = str(rivals.HERE / f"agree_{library}.py")
        child = Child([*start, script], spec, limit)
        child.ready()
        child.go()
        child.close()
        with np.load(out, allow_pickle=False) as stored:
            return given, dict(stored)


def compared(library: str, start: Sequence[str], checkout: str, name: str, limit: float) -> Any:
    """A method of a library beside ours."""
    try:
        given, theirs = of_theirs(library, start, checkout, name, limit)
    except Gone as reason:
        return {"verdict": "not run", "why": str(reason)}
    mine = ours.rounds(name, given)
    first, last = (judged.gap(mine, theirs, t) for t in (1, ours.ROUNDS))
    return judged.verdict(first, last, getattr(METHODS[name], library))


def table(found: Mapping[str, Mapping[str, Any]]) -> text_tables.Table:
    """A row for each method, a pair of columns for each library."""
    names = [name for name in METHODS if any(name in each for each in found.values())]
    heads = [head for key in found for head in (rivals.NAMES[key], "after 1 and 3 rounds")]
    rows = [
        [name, *(cell for key in found for cell in _cells(found[key].get(name)))] for name in names
    ]
    return text_tables.Table("", heads, rows)


def _cells(one: Mapping[str, Any] | None) -> list[str]:
    if one is None:
        return ["", ""]
    if "after 1" not in one:
        return [one["verdict"], ""]
    gaps = [judged.Gap(**one[key]).worst for key in ("after 1", "after all")]
    return [one["verdict"], ", ".join(f"{gap:.0e}" for gap in gaps)]


def reasons(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why what differs does."""
    return [
        f"{name} in {rivals.NAMES[key]}: {one['why']}"
        for key, each in found.items()
        for name, one in each.items()
        if one.get("why")
    ]


def main(argv: Sequence[str]) -> None:
    """Compare, print, write."""
    given = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag")
    for name in given.methods:
        if name not in METHODS:
            raise UsageError(f"--methods has {name!r}{configuration.nearest(name, METHODS)}")
    paths = {key: str(given[key].value) for key in LIBRARIES if given[key].value}
    if not paths:
        raise UsageError("name a checkout: --pfllib=PATH or --fl_bench=PATH")
    checkouts = {key: rivals.checked(key, path) for key, path in paths.items()}
    found: dict[str, dict[str, Any]] = {key: {} for key in checkouts}
    for key, path in checkouts.items():
        start = [rivals.python(f"{key}_python", given[f"{key}_python"].value)]
        for name, method in METHODS.items():
            if getattr(method, key) is None or (given.methods and name not in given.methods):
                continue
            found[key][name] = compared(key, start, path, name, given.limit)
            print(f"{key} {name}: {found[key][name]['verdict']}", file=sys.stderr, flush=True)
    print("\n\n".join([text_tables.text([table(found)]), *map(text_tables.filled, reasons(found))]))
    if given.out is not None:
        commits = {key: rivals.commit(path) for key, path in checkouts.items()}
        whole = {"commits": commits, "methods": found}
        Path(given.out).write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for _key in LIBRARIES:
        flags.DEFINE_string(_key, None, f"A checkout of {rivals.RIVALS[_key].repository}.")
        flags.DEFINE_string(f"{_key}_python", None, "The Python that runs it. Default: this one.")
    flags.DEFINE_list("methods", [], "Some of them. Default: all.")
    flags.DEFINE_string("out", None, "JSON file.")
    flags.DEFINE_float("limit", 300.0, "Seconds that an answer may take.")
    command(main)
