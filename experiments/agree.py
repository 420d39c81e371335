"""Compares methods with other libraries, by parameters or by accuracy.

python -m experiments.agree --pfllib=CHECKOUT --fl_bench=CHECKOUT
                            --pfllib_python=PYTHON --fl_bench_python=PYTHON
                            --methods=fedrep,ditto --out=FILE.json
python -m experiments.agree --rounds=50 --seeds=3 ...

Examples, initial parameters, full batches, rates and numbers of steps are the same. Nothing is
random, so only the method can differ. Parameters are compared after one and three rounds, and the
verdict is the same, or different with the reason. With --rounds, test accuracies are compared after
that many rounds; each library samples its own batches and evaluates in its own way. The libraries
run from checkouts, each in its own process with its own Python. The file is written after each
method, and methods with a result in it are not run again. See docs/agreement.md.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments.flag_checks import refuse_unread, require_folders
from experiments.libraries import reference_work, rivals, scored
from experiments.libraries.methods import METHODS, Rival
from experiments.libraries.rivals import Child, Gone
from fedjax_pfl.cli.command import run_script
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import text_tables
from fedjax_pfl.settings import configuration

LIBRARIES = ("pfllib", "fl_bench")
ROUNDING = 1e-4  # smaller relative distances come from the order of float32 sums


class Gap(NamedTuple):
    """‖library − rival‖ relative to how far the rival moved since the start.

    None if neither moved or nothing is compared, infinity if only the library moved.
    """

    server: float | None
    clients: float | None

    @property
    def worst(self) -> float:
        """Returns the larger of both: NaN if one is, infinity if there is none."""
        values = [value for value in self if value is not None]
        return float(np.max(values)) if values else float("inf")


def gap(library: Mapping[str, np.ndarray], rival: Mapping[str, np.ndarray], t: int) -> Gap:
    """Returns the gap after t rounds over the parameters that both libraries have.

    Parameters are keyed by ROUND/OWNER/NAME.
    """

    def part(is_server: bool) -> float | None:
        distance = movement = 0.0
        for name, value in rival.items():
            round_, owner, leaf = name.split("/")
            if round_ == str(t) and (owner == "server") == is_server and name in library:
                distance += float(np.sum(np.square(np.float64(library[name]) - value)))
                change = np.float64(value) - rival[f"0/{owner}/{leaf}"]
                movement += float(np.sum(np.square(change)))
        if not movement:
            return float("inf") if distance else None
        return float(np.sqrt(distance / movement))

    return Gap(part(True), part(False))


def verdict(first: Gap, last: Gap, rival: Rival) -> dict[str, Any]:
    """Returns the verdict on a method, as the results file holds it.

    `first` is the gap after one round, `last` the gap after all rounds.
    """
    entry = {"after 1": first._asdict(), "after all": last._asdict()}
    if first.worst < ROUNDING and last.worst < ROUNDING:
        return {**entry, "verdict": "same"}
    return {**entry, "verdict": "differs", "why": rival.why}


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


def rival_results(side: Side, runs: Sequence[Run]) -> Iterator[dict[str, np.ndarray]]:
    """Yields a library's results of the runs, from one process; raises Gone if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        specs: list[dict[str, Any]] = []
        for k, (name, work, options) in enumerate(runs):
            rival: Rival = getattr(METHODS[name], side.library)
            paths = {key: str(Path(folder, f"{key}{k}.npz")) for key in ("work", "out")}
            np.savez(paths["work"], **work)  # type: ignore[arg-type]
            settings = {"epochs": rival.epochs, "settings": dict(rival.settings)}
            specs.append({"algorithm": name, **settings, **paths, **options})
        script = str(rivals.ADAPTERS / f"agree_{side.library}.py")
        child = Child([*side.start, script], {"checkout": side.checkout, "runs": specs}, side.limit)
        try:
            child.wait_until_ready()
            for spec in specs:
                child.go()
                with np.load(spec["out"], allow_pickle=False) as stored:
                    yield dict(stored)
        finally:
            child.close()


def compare_parameters(side: Side, name: str) -> Any:
    """Returns the verdict on a method of a library, by parameters."""
    work = reference_work.work(METHODS[name].norm, METHODS[name].examples)
    inputs = {**work, **reference_work.added_parameters(name, work)}
    run = Run(name, inputs, {"rounds": reference_work.ROUNDS, "rate": reference_work.RATE})
    try:
        (rival,) = rival_results(side, [run])
    except Gone as reason:
        return {"verdict": "not run", "why": str(reason)}
    parameters = reference_work.rounds(name, work)
    first, last = (gap(parameters, rival, t) for t in (1, reference_work.ROUNDS))
    return verdict(first, last, getattr(METHODS[name], side.library))


def parameter_results(
    sides: Sequence[Side], methods: Sequence[str], out: str | None
) -> dict[str, Any]:
    """Returns commits and verdicts by parameters, written to `out` after each method.

    Methods with a verdict in the file are not run again, unless it is "not run".
    """
    results = read_results(out, {"commits": _commits(sides), "methods": {}})
    for side in sides:
        verdicts = results["methods"].setdefault(side.library, {})
        for name in methods:
            is_missing = verdicts.get(name, {}).get("verdict", "not run") == "not run"
            if getattr(METHODS[name], side.library) is not None and is_missing:
                verdicts[name] = entry = compare_parameters(side, name)
                print(f"{side.library} {name}: {entry['verdict']}", file=sys.stderr, flush=True)
                if out is not None:
                    _write(out, results)
    return results


def read_results(out: str | None, about: dict[str, Any]) -> dict[str, Any]:
    """Returns the results in the file `out`, or `about` if there is no such file.

    `about` has the facts that all results share, and "methods" if they are verdicts by parameters.
    Raises UsageError if the file is damaged, or has results of the other kind or other facts.
    """
    if out is None or not Path(out).is_file():
        return about
    try:
        stored: dict[str, Any] = dict(json.loads(Path(out).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{out} has no results ({error}); name another or delete it") from None
    if ("methods" in stored) != ("methods" in about):
        kind = "parameters" if "methods" in stored else "accuracies"
        raise UsageError(f"{out} has results by {kind}; name another")
    for key, value in about.items():
        if key != "methods" and stored.get(key) != value:
            raise UsageError(f"{out} has {key} {stored.get(key)}, not {value}; name another")
    return stored


def rival_accuracies(
    side: Side, names: Sequence[str], seeds: int, rounds: int
) -> Iterator[tuple[str, scored.Accuracies]]:
    """Yields a library's accuracies by method; prints a line for a method that cannot be run."""
    options = {"rounds": rounds, "rate": scored.RATE, "batch": scored.BATCH}
    remaining = list(names)
    while remaining:
        runs = [
            Run(name, scored.inputs(name, seed), {**options, "seed": seed})
            for name in remaining
            for seed in range(seeds)
        ]
        try:
            results = rival_results(side, runs)
            while remaining:
                shares = [next(results) for _ in range(seeds)]
                means = {s: [float(np.mean(share[s])) for share in shares] for s in scored.STAGES}
                yield remaining.pop(0), means
        except Gone as reason:  # the other methods continue in another process
            print(f"{side.library} {remaining.pop(0)}: {reason}", file=sys.stderr, flush=True)


def accuracies(
    sides: Sequence[Side], methods: Sequence[str], seeds: int, rounds: int, out: str | None
) -> scored.Results:
    """Returns accuracies of this library and others, written to `out` after each method.

    Methods that the file already has are not run again.
    """
    about = {"rounds": rounds, "seeds": seeds, "commits": _commits(sides)}
    results: scored.Results = read_results(out, about)
    library_scores = results.setdefault("library", {})
    for side in sides:
        rival_scores = results.setdefault("rivals", {}).setdefault(side.library, {})
        missing = [
            n for n in methods if getattr(METHODS[n], side.library) and n not in rival_scores
        ]
        for name, means in rival_accuracies(side, missing, seeds, rounds):
            if name not in library_scores:
                library_scores[name] = scored.rounds(name, METHODS[name].norm, range(seeds), rounds)
            rival_scores[name] = means
            print(f"{side.library} {name}", file=sys.stderr, flush=True)
            if out is not None:
                _write(out, results)
    return results


def _commits(sides: Sequence[Side]) -> dict[str, str]:
    return {side.library: rivals.commit(side.checkout) for side in sides}


def _print(result: text_tables.Table, sentences: Sequence[str]) -> None:
    paragraphs = map(text_tables.fill_paragraph, sentences)
    print("\n\n".join([text_tables.text([result]), *paragraphs]))


def _write(out: str, results: Any) -> None:
    Path(out).write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def table(verdicts: Mapping[str, Mapping[str, Any]]) -> text_tables.Table:
    """Returns a table with a row per method and two columns per library."""
    names = [name for name in METHODS if any(name in methods for methods in verdicts.values())]
    heads = [head for key in verdicts for head in (rivals.NAMES[key], "distance")]
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
    return [verdict["verdict"], f"{Gap(**verdict['after all']).worst:.0e}"]


def reasons(verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each method that differs or was not run."""
    return [
        f"{name} in {rivals.NAMES[key]}: {verdict['why']}"
        for key, methods in verdicts.items()
        for name, verdict in methods.items()
        if verdict.get("why")
    ]


def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    flag_values = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag")
    for name in flag_values.methods:
        if name not in METHODS:
            raise UsageError(f"--methods has {name!r}{configuration.suggestion(name, METHODS)}")
    if not flag_values.rounds:
        refuse_unread(flag_values, ["seeds"], "without --rounds")
    paths = {key: str(flag_values[key].value) for key in LIBRARIES if flag_values[key].value}
    if not paths:
        raise UsageError("name a checkout: --pfllib=PATH or --fl_bench=PATH")
    for key in LIBRARIES:
        if key not in paths:
            refuse_unread(flag_values, [f"{key}_python"], f"without --{key}")
    for name in flag_values.methods:
        if not any(getattr(METHODS[name], key) for key in paths):
            libraries = [key for key in LIBRARIES if getattr(METHODS[name], key)]
            raise UsageError(
                f"--methods has {name!r}, which is compared with --{libraries[0]} only"
            )
    sides = [
        Side(
            library=key,
            start=[rivals.python(f"{key}_python", flag_values[f"{key}_python"].value)],
            checkout=rivals.checkout(key, path),
            limit=flag_values.limit,
        )
        for key, path in paths.items()
    ]
    methods = flag_values.methods or list(METHODS)
    require_folders(flag_values, "out")
    if flag_values.rounds:
        results = accuracies(sides, methods, flag_values.seeds, flag_values.rounds, flag_values.out)
        _print(scored.table(results), scored.reasons(results))
        return
    verdicts = parameter_results(sides, methods, flag_values.out)["methods"]
    _print(table(verdicts), reasons(verdicts))


if __name__ == "__main__":
    for _key in LIBRARIES:
        flags.DEFINE_string(_key, None, f"A checkout of {rivals.RIVALS[_key].repository}.")
        flags.DEFINE_string(f"{_key}_python", None, "The Python that runs it. Default: this one.")
    flags.DEFINE_list("methods", [], "Methods to compare. Default: all.")
    flags.DEFINE_integer("rounds", 0, "Compare accuracies after this many rounds.", lower_bound=0)
    flags.DEFINE_integer(
        "seeds", 3, "With --rounds: seeds, for the standard deviation.", lower_bound=2
    )
    flags.DEFINE_string("out", None, "JSON file of the results.")
    flags.DEFINE_float("limit", 300.0, "Most seconds that an answer may take.", 1.0)
    run_script(main, __doc__)
