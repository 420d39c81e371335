"""Whether our methods do what those of other libraries do: parameters, or accuracies.

python -m experiments.agree --pfllib=CHECKOUT --fl_bench=CHECKOUT
                            --pfllib_python=PYTHON --fl_bench_python=PYTHON
                            --methods=fedrep,ditto --out=FILE.json
python -m experiments.agree --rounds=50 --seeds=3 ...

The same examples, the same first parameters, full batches, the same rates and numbers of steps: so
nothing is random, and what differs is the method. Compared are parameters after one round and
three. With --rounds it is accuracies on test examples after so many, by batches that each side
draws by itself, and by each side's own way to evaluate. The libraries are run from checkouts that
you have, each in a process of its own, by a Python that has what they need. Each method ends as the
same, or as different and why; the file is written after each, and what it has is not run again. See
docs/agreement.md.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments.libraries import judged, ours, rivals, scored
from experiments.libraries.methods import METHODS, Theirs
from experiments.libraries.rivals import Child, Gone
from fedjax_pfl.cli.command import run_script
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import text_tables
from fedjax_pfl.settings import configuration

LIBRARIES = ("pfllib", "fl_bench")


class Side(NamedTuple):
    """A library that is there."""

    library: str
    start: Sequence[str]  # what starts its Python
    checkout: str
    limit: float  # seconds that an answer may take


class Run(NamedTuple):
    """A method on a work."""

    name: str
    given: Mapping[str, np.ndarray]
    more: Mapping[str, Any]  # rounds, rate and, for accuracies, batch and seed


def of_theirs(side: Side, runs: Sequence[Run]) -> Iterator[dict[str, np.ndarray]]:
    """What a library makes of each, one after the other in one process; Gone where it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        specs: list[dict[str, Any]] = []
        for k, (name, given, more) in enumerate(runs):
            theirs: Theirs = getattr(METHODS[name], side.library)
            places = {key: str(Path(folder, f"{key}{k}.npz")) for key in ("work", "out")}
            np.savez(places["work"], **given)  # type: ignore[arg-type]
            about = {"algorithm": name, "epochs": theirs.epochs, "settings": dict(theirs.settings)}
            specs.append({**about, **places, **more})
        script = str(rivals.HERE / f"agree_{side.library}.py")
        child = Child([*side.start, script], {"checkout": side.checkout, "runs": specs}, side.limit)
        try:
            child.ready()
            for spec in specs:
                child.go()
                with np.load(spec["out"], allow_pickle=False) as stored:
                    yield dict(stored)
        finally:
            child.close()


def compared(side: Side, name: str) -> Any:
    """A method of a library beside ours, by parameters."""
    given = ours.work(METHODS[name].norm, METHODS[name].examples)
    run = Run(name, given, {"rounds": ours.ROUNDS, "rate": ours.RATE})
    try:
        (theirs,) = of_theirs(side, [run])
    except Gone as reason:
        return {"verdict": "not run", "why": str(reason)}
    mine = ours.rounds(name, given)
    first, last = (judged.gap(mine, theirs, t) for t in (1, ours.ROUNDS))
    return judged.verdict(first, last, getattr(METHODS[name], side.library))


def scored_there(
    side: Side, names: Sequence[str], seeds: int, rounds: int
) -> Iterator[tuple[str, scored.Accuracies]]:
    """A library's accuracies, method after method; of one that cannot be run a line is said."""
    how = {"rounds": rounds, "rate": scored.RATE, "batch": scored.BATCH}
    left = list(names)
    while left:
        runs = [
            Run(name, scored.work(METHODS[name].norm, seed), {**how, "seed": seed})
            for name in left
            for seed in range(seeds)
        ]
        try:
            each = of_theirs(side, runs)
            while left:
                shares = [next(each) for _ in range(seeds)]
                means = {s: [float(np.mean(one[s])) for one in shares] for s in scored.STAGES}
                yield left.pop(0), means
        except Gone as reason:  # the others go on in another process
            print(f"{side.library} {left.pop(0)}: {reason}", file=sys.stderr, flush=True)


def accuracies(
    sides: Sequence[Side], methods: Sequence[str], seeds: int, rounds: int, out: str | None
) -> scored.Results:
    """Of ours and theirs, going on from what the file has."""
    commits = {side.library: rivals.commit(side.checkout) for side in sides}
    found: scored.Results = {"rounds": rounds, "seeds": seeds, "commits": commits}
    if out is not None and Path(out).is_file():
        before = json.loads(Path(out).read_text())
        for key, value in found.items():
            if before.get(key) != value:
                raise UsageError(f"{out} has {key} {before.get(key)}, not {value}; name another")
        found = before
    mine = found.setdefault("ours", {})
    for side in sides:
        there = found.setdefault("theirs", {}).setdefault(side.library, {})
        asked = [n for n in methods if getattr(METHODS[n], side.library) and n not in there]
        for name, means in scored_there(side, asked, seeds, rounds):
            if name not in mine:
                mine[name] = scored.rounds(name, METHODS[name].norm, range(seeds), rounds)
            there[name] = means
            print(f"{side.library} {name}", file=sys.stderr, flush=True)
            if out is not None:
                _write(out, found)
    return found


def _write(out: str, whole: Any) -> None:
    Path(out).write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


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
            raise UsageError(f"--methods has {name!r}{configuration.suggestion(name, METHODS)}")
    paths = {key: str(given[key].value) for key in LIBRARIES if given[key].value}
    if not paths:
        raise UsageError("name a checkout: --pfllib=PATH or --fl_bench=PATH")
    sides = [
        Side(
            key,
            [rivals.python(f"{key}_python", given[f"{key}_python"].value)],
            rivals.checked(key, path),
            given.limit,
        )
        for key, path in paths.items()
    ]
    methods = given.methods or list(METHODS)
    if given.rounds:
        whole = accuracies(sides, methods, given.seeds, given.rounds, given.out)
        why = map(text_tables.filled, scored.reasons(whole))
        print("\n\n".join([text_tables.text([scored.table(whole)]), *why]))
        return
    found: dict[str, dict[str, Any]] = {side.library: {} for side in sides}
    for side in sides:
        for name in methods:
            if getattr(METHODS[name], side.library) is not None:
                found[side.library][name] = one = compared(side, name)
                print(f"{side.library} {name}: {one['verdict']}", file=sys.stderr, flush=True)
    print("\n\n".join([text_tables.text([table(found)]), *map(text_tables.filled, reasons(found))]))
    if given.out is not None:
        commits = {side.library: rivals.commit(side.checkout) for side in sides}
        _write(given.out, {"commits": commits, "methods": found})


if __name__ == "__main__":
    for _key in LIBRARIES:
        flags.DEFINE_string(_key, None, f"A checkout of {rivals.RIVALS[_key].repository}.")
        flags.DEFINE_string(f"{_key}_python", None, "The Python that runs it. Default: this one.")
    flags.DEFINE_list("methods", [], "Some of them. Default: all.")
    flags.DEFINE_integer("rounds", 0, "Compare accuracies after so many.", lower_bound=0)
    flags.DEFINE_integer("seeds", 3, "Of accuracies.", lower_bound=1)
    flags.DEFINE_string("out", None, "JSON file.")
    flags.DEFINE_float("limit", 300.0, "Seconds that an answer may take.")
    run_script(main, __doc__)
