"""Runs of a grid search: configurations of each method, finished runs, and missing runs."""

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison, run_reader
from fedjax_pfl.report.run_index import RunIndex
from fedjax_pfl.runs import interrupt, resume, runner
from fedjax_pfl.runs.build import build
from fedjax_pfl.runs.tuning.choice import PointResult
from fedjax_pfl.runs.tuning.grids import Point, apply, format_value
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.configuration import BUILTINS, Registry
from fedjax_pfl.settings.general import settings_with
from fedjax_pfl.simulation import sweep

# What says how many client visits a run has; on the command line it is for all methods alike.
LENGTH = settings_with("sets_participation")


class Trial(NamedTuple):
    """Points of a method's grid to run."""

    method: str
    config: ConfigDict  # before the values of a point are applied
    points: Sequence[Point]
    whole: int  # number of points of the full grid
    words: Registry = BUILTINS  # components by name


class Job(NamedTuple):
    """A run that is missing or unfinished."""

    method: str
    point: Point
    config: ConfigDict
    name: str  # of its directory
    steps: frozenset[int]  # rounds of its checkpoints


def length(config: ConfigDict, words: Registry = BUILTINS) -> int:
    """Returns the number of rounds of a run."""
    return sum(one.rounds for one in configuration.phases(config, words))


def cohorts(config: ConfigDict, words: Registry = BUILTINS) -> list[tuple[int, int]]:
    """Returns the number of rounds, and of clients in a round, of each phase."""
    novel = {"active": config.clients - config.held_out, "held_out": config.held_out}
    return [
        (one.rounds, one.clients_per_round or novel[one.participants])
        for one in configuration.phases(config, words)
    ]


def visits(config: ConfigDict, words: Registry = BUILTINS) -> int:
    """Returns the number of client updates of a run."""
    return sum(rounds * clients for rounds, clients in cohorts(config, words))


def evaluations(config: ConfigDict, words: Registry = BUILTINS) -> int:
    """Returns the number of evaluations in the last phase, from which the best is selected."""
    return -(-_last(config, words) // config.eval_every)


def _last(config: ConfigDict, words: Registry) -> int:
    return int(configuration.phases(config, words)[-1].rounds)


def shorten(each: Mapping[str, ConfigDict], rounds: int, words: Registry = BUILTINS) -> None:
    """Sets the rounds of the first method, and those of the others in proportion, in place.

    Raises UsageError if methods with equal client visits would get different ones.
    """
    first, *_ = each.values()
    whole, wanted = length(first, words), visits(first, words)
    equal = {m: cohorts(one, words) for m, one in each.items() if visits(one, words) == wanted}
    for config in each.values():
        _shorten(config, max(1, round(rounds * length(config, words) / whole)), words)
    counts = {method: visits(each[method], words) for method in equal}
    apart = [method for method in equal if counts[method] != visits(first, words)]
    if apart:
        parts = [n for phases in equal.values() for n, _ in phases]
        step = math.lcm(*(whole // math.gcd(whole, n) for n in parts))
        raise UsageError(
            f"{rounds} rounds would give {next(iter(each))} {visits(first, words)} client visits "
            f"and {apart[0]} {counts[apart[0]]}, which have as many otherwise; give a multiple of "
            f"{step}"
        )


def _shorten(config: ConfigDict, rounds: int, words: Registry) -> None:
    """Sets the rounds of a run in place. Phases keep their shares."""
    each = [one.rounds for one in configuration.phases(config, words)]
    whole = sum(each)
    if whole == rounds:
        return
    parts = [max(1, round(rounds * n / whole)) for n in each[:-1]]
    if sum(parts) >= rounds:
        raise UsageError(
            f"{config.algorithm} would have {rounds} rounds, too few for {len(each)} phases of "
            f"{each} rounds; give more"
        )
    config.rounds = rounds
    parts = [*parts, rounds - sum(parts)]
    config.phases = tuple(
        {**one, "rounds": n} for one, n in zip(config.phases, parts, strict=False)
    )


def evaluate_alike(each: Mapping[str, ConfigDict], words: Registry = BUILTINS) -> None:
    """Gives all methods the same number of evaluations, in place, by changing `eval_every`.

    The number is that of the first method, or the largest that all methods can have.
    """
    wanted = evaluations(next(iter(each.values())), words)
    while {evaluations(config, words) for config in each.values()} != {wanted}:
        for config in each.values():
            if evaluations(config, words) != wanted:  # no more of them then, and fewer rarely
                config.eval_every = -(-_last(config, words) // wanted)
        wanted = min(evaluations(config, words) for config in each.values())


def check(trials: Sequence[Trial], as_preset: bool = False) -> None:
    """Raises UsageError if the methods cannot be compared or scored.

    Args:
      trials: Points of each method.
      as_preset: True if client visits may differ between methods, as in their presets.
    """
    first, words = trials[0], trials[0].words
    config = first.config
    if not config.validation_fraction and config.validation_examples is None:
        raise UsageError(
            "there are no validation examples, by which to choose; set validation_fraction to 0.2"
        )

    def problem(one: ConfigDict) -> Any:
        return comparison.data_settings(configuration.resolve(one, words))

    counts = {trial.method: visits(trial.config, words) for trial in trials}
    if len(set(counts.values())) > 1 and not as_preset:
        said = ", ".join(f"{method} {count}" for method, count in counts.items())
        raise UsageError(
            f"the methods' runs have different client visits ({said}), and budgets are equal; "
            f"leave {' and '.join(map('config.{}'.format, LENGTH))} to the presets, and give "
            "--rounds=N, which shortens all in proportion"
        )
    for trial in trials:
        if problem(trial.config) != problem(config):
            raise UsageError(
                f"the preset gives {trial.method} other examples than {first.method}; set them "
                "with --config.KEY=VALUE"
            )
        for point in trial.points:
            configuration.specify(apply(trial.config, point), words)


def configs(trial: Trial, seeds: int) -> Iterator[tuple[Point, list[ConfigDict]]]:
    """Yields every point with its configuration for each seed."""
    for point in trial.points:
        one = apply(trial.config, point)
        each = [one.copy_and_resolve_references() for _ in range(seeds)]
        for number, config in enumerate(each):
            config.update(seed=one.seed + number, seeds=1, sweep="")
        yield point, each


def collect(trial: Trial, seeds: int, folder: Path) -> list[PointResult]:
    """Returns the finished runs of every point."""
    known, tried = RunIndex(folder), []
    for point, each in configs(trial, seeds):
        paths = {config.seed: known.find(config, trial.words)[1] for config in each}
        runs = {
            seed: run_reader.read(path)
            for seed, path in paths.items()
            if path is not None and (path / "report.html").is_file()
        }
        tried.append(PointResult(point, each[0], runs, seeds))
    return tried


def run(trials: Sequence[Trial], seeds: int, folder: Path, together: int | None) -> None:
    """Trains missing runs and resumes unfinished ones, in as few programs as possible.

    Builds all programs before the first is compiled, so that errors appear at the start.

    Args:
      trials: Points of each method.
      seeds: Number of seeds.
      folder: Folder of the runs.
      together: Most runs in one program. Default: no limit.
    """
    known, count, words = RunIndex(folder), 0, trials[0].words
    todo: dict[str, Job] = {}
    for trial in trials:
        for point, each in configs(trial, seeds):
            count += len(each)
            for config in each:
                key, path = known.find(config, words)
                if path is None:
                    name, steps = _name(trial.method, point, config.seed, key), frozenset[int]()
                elif (path / "report.html").is_file():
                    continue
                else:
                    name, steps = str(path.relative_to(folder)), _steps(path)
                todo.setdefault(key, Job(trial.method, point, config, name, steps))
    with interrupt.on_signals() as stop:
        programs = [
            part
            for alike in _alike(list(todo.values()))
            for program in _programs(alike, words)
            for part in _parts(program, together)
        ]
        cut = sum(bool(job.steps) for job in todo.values())
        facts = f"{count - len(todo)} are there, {cut} go on, {len(todo) - cut} are missing"
        inside = f", in {len(programs)} program{'s' * (len(programs) > 1)}" if programs else ""
        print(f"{count} run{'s' * (count != 1)}: {facts}{inside}", file=sys.stderr)
        for number, jobs in enumerate(programs, 1):
            where = f"{jobs[0].method}: {len(jobs)} run{'s' * (len(jobs) > 1)}"
            print(f"[{number}/{len(programs)}] {where}", file=sys.stderr, flush=True)
            runner.run_configs({job.name: job.config for job in jobs}, folder, stop, registry=words)


def _is_sweepable(name: str, method: str) -> bool:
    return name in settings_with("sweepable") or name.startswith(f"{method}.")


def _alike(jobs: Sequence[Job]) -> list[list[Job]]:
    """Groups runs that differ in sweepable settings only and that can be resumed together."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        apart = {
            name: value
            for name, value in job.point.items()
            if not (isinstance(value, float) and _is_sweepable(name, job.method))
        }
        groups.setdefault(repr((job.method, apart)), []).append(job)
    return [
        [alike[i] for i in which]
        for alike in groups.values()
        for which in resume.group_by_checkpoint([job.steps for job in alike])
    ]


def _programs(jobs: list[Job], words: Registry = BUILTINS) -> list[list[Job]]:
    """Splits runs into programs by the settings that need separate programs."""
    try:
        built = build(*(job.config for job in jobs), registry=words)
    except sweep.SeparateRunsError as error:
        groups: dict[tuple[Any, ...], list[Job]] = {}
        for job in jobs:
            groups.setdefault(tuple(job.point.get(name) for name in error.names), []).append(job)
        if len(groups) < 2:
            raise
        return [program for group in groups.values() for program in _programs(group, words)]
    except UsageError as error:
        raise UsageError(f"{jobs[0].method}: {error}") from error
    federation = built.federation
    counts = federation.validation_counts
    if counts is None or not counts[federation.active].any():
        raise UsageError("no client has validation examples; raise validation_fraction")
    return [jobs]


def _parts(jobs: list[Job], most: int | None) -> list[list[Job]]:
    count = math.ceil(len(jobs) / (most or len(jobs)))
    size = math.ceil(len(jobs) / count)  # parts as equal as can be: sizes are programs of their own
    return [jobs[i : i + size] for i in range(0, len(jobs), size)]


def _steps(path: Path) -> frozenset[int]:
    return frozenset(int(p.name) for p in path.glob("checkpoints/*") if p.name.isdigit())


def _name(method: str, point: Point, seed: int, key: str) -> str:
    """Returns a directory name: readable settings, and a digest of all settings."""
    words = ",".join(
        [*(f"{name}={format_value(value)}" for name, value in point.items()), f"seed={seed}"]
    )
    plain = "".join(c if c.isalnum() or c in "-_.=," else "_" for c in words)[:150]
    return f"{method}/{plain}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
