"""Compares methods with those of other libraries, by parameters or by accuracy.

python -m experiments.agree --pfllib=CHECKOUT --fl_bench=CHECKOUT
                            --pfllib_python=PYTHON --fl_bench_python=PYTHON
                            --methods=fedrep,ditto --out=FILE.json
python -m experiments.agree --rounds=50 --seeds=3 ...

Examples, initial parameters, full batches, rates and numbers of steps are the same, so nothing is
random and only the method can differ. Parameters are compared after one and three rounds. With
--rounds, accuracies on test examples are compared after that many rounds; each library samples its
own batches and evaluates in its own way. The libraries run from checkouts, each in its own process
with its own Python. The verdict on a method is the same, or different with the reason. The file is
written after each method; methods that it contains are not run again. See docs/agreement.md.
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
    """Another library: its checkout and its Python."""

    library: str
    start: Sequence[str]  # command that starts its Python
    checkout: str
    limit: float  # most seconds per answer


class Run(NamedTuple):
    """A method and the work to run it on."""

    name: str
    work: Mapping[str, np.ndarray]
    options: Mapping[str, Any]  # rounds, rate and, for accuracies, batch and seed


def of_theirs(side: Side, runs: Sequence[Run]) -> Iterator[dict[str, np.ndarray]]:
    """Yields a library's results of the runs, from one process; raises Gone if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        specs: list[dict[str, Any]] = []
        for k, (name, work, options) in enumerate(runs):
            theirs: Theirs = getattr(METHODS[name], side.library)
            places = {key: str(Path(folder, f"{key}{k}.npz")) for key in ("work", "out")}
            np.savez(places["work"], **work)  # type: ignore[arg-type]
            request = {
                "algorithm": name,
                "epochs": theirs.epochs,
                "settings": dict(theirs.settings),
            }
            specs.append({**request, **places, **options})
        script = str(rivals.ADAPTERS / f"agree_{side.library}.py")
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
    """Returns the verdict on a method of a library, by parameters."""
    work = ours.work(METHODS[name].norm, METHODS[name].examples)
    run = Run(name, work, {"rounds": ours.ROUNDS, "rate": ours.RATE})
    try:
        (theirs,) = of_theirs(side, [run])
    except Gone as reason:
        return {"verdict": "not run", "why": str(reason)}
    parameters = ours.rounds(name, work)
    first, last = (judged.gap(parameters, theirs, t) for t in (1, ours.ROUNDS))
    return judged.verdict(first, last, getattr(METHODS[name], side.library))


def scored_there(
    side: Side, names: Sequence[str], seeds: int, rounds: int
) -> Iterator[tuple[str, scored.Accuracies]]:
    """Yields a library's accuracies by method; prints a line for a method that cannot be run."""
    options = {"rounds": rounds, "rate": scored.RATE, "batch": scored.BATCH}
    remaining = list(names)
    while remaining:
        runs = [
            Run(name, scored.work(METHODS[name].norm, seed), {**options, "seed": seed})
            for name in remaining
            for seed in range(seeds)
        ]
        try:
            results = of_theirs(side, runs)
            while remaining:
                shares = [next(results) for _ in range(seeds)]
                means = {s: [float(np.mean(share[s])) for share in shares] for s in scored.STAGES}
                yield remaining.pop(0), means
        except Gone as reason:  # the other methods continue in another process
            print(f"{side.library} {remaining.pop(0)}: {reason}", file=sys.stderr, flush=True)


def accuracies(
    sides: Sequence[Side], methods: Sequence[str], seeds: int, rounds: int, out: str | None
) -> scored.Results:
    """Returns accuracies of this library and others; continues the file if it exists."""
    commits = {side.library: rivals.commit(side.checkout) for side in sides}
    results: scored.Results = {"rounds": rounds, "seeds": seeds, "commits": commits}
    if out is not None and Path(out).is_file():
        stored = json.loads(Path(out).read_text())
        for key, value in results.items():
            if stored.get(key) != value:
                raise UsageError(f"{out} has {key} {stored.get(key)}, not {value}; name another")
        results = stored
    our_scores = results.setdefault("ours", {})
    for side in sides:
        rival_scores = results.setdefault("theirs", {}).setdefault(side.library, {})
        missing = [
            n for n in methods if getattr(METHODS[n], side.library) and n not in rival_scores
        ]
        for name, means in scored_there(side, missing, seeds, rounds):
            if name not in our_scores:
                our_scores[name] = scored.rounds(name, METHODS[name].norm, range(seeds), rounds)
            rival_scores[name] = means
            print(f"{side.library} {name}", file=sys.stderr, flush=True)
            if out is not None:
                _write(out, results)
    return results


def _write(out: str, results: Any) -> None:
    Path(out).write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def table(verdicts: Mapping[str, Mapping[str, Any]]) -> text_tables.Table:
    """Returns a table with a row per method and two columns per library."""
    names = [name for name in METHODS if any(name in methods for methods in verdicts.values())]
    heads = [head for key in verdicts for head in (rivals.NAMES[key], "after 1 and 3 rounds")]
    rows = [
        [name, *(cell for key in verdicts for cell in _cells(verdicts[key].get(name)))]
        for name in names
    ]
    return text_tables.Table("", heads, rows)


def _cells(verdict: Mapping[str, Any] | None) -> list[str]:
    if verdict is None:
        return ["", ""]
    if "after 1" not in verdict:
        return [verdict["verdict"], ""]
    gaps = [judged.Gap(**verdict[key]).worst for key in ("after 1", "after all")]
    return [verdict["verdict"], ", ".join(f"{gap:.0e}" for gap in gaps)]


def reasons(verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the reason for methods difference."""
    return [
        f"{name} in {rivals.NAMES[key]}: {verdict['why']}"
        for key, methods in verdicts.items()
        for name, verdict in methods.items()
        if verdict.get("why")
    ]


def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
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
        results = accuracies(sides, methods, given.seeds, given.rounds, given.out)
        why = map(text_tables.fill_paragraph, scored.reasons(results))
        print("\n\n".join([text_tables.text([scored.table(results)]), *why]))
        return
    verdicts: dict[str, dict[str, Any]] = {side.library: {} for side in sides}
    for side in sides:
        for name in methods:
            if getattr(METHODS[name], side.library) is not None:
                verdicts[side.library][name] = verdict = compared(side, name)
                print(f"{side.library} {name}: {verdict['verdict']}", file=sys.stderr, flush=True)
    print(
        "\n\n".join(
            [
                text_tables.text([table(verdicts)]),
                *map(text_tables.fill_paragraph, reasons(verdicts)),
            ]
        )
    )
    if given.out is not None:
        commits = {side.library: rivals.commit(side.checkout) for side in sides}
        _write(given.out, {"commits": commits, "methods": verdicts})


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
