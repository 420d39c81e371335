"""Runs of a grid search: configurations of each method, finished runs, and missing runs."""

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_pfl import data
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison, run_reader
from fedjax_pfl.report.run_index import RunIndex
from fedjax_pfl.runs import interrupt, resume, run_directory, runner, sweep_settings
from fedjax_pfl.runs.build import build
from fedjax_pfl.runs.example_facts import example_facts
from fedjax_pfl.runs.tuning.choice import PointResult
from fedjax_pfl.runs.tuning.grids import Point, apply, format_value
from fedjax_pfl.settings import configuration, selection
from fedjax_pfl.settings.configuration import BUILTINS, Registry
from fedjax_pfl.settings.general import SETTINGS, settings_with
from fedjax_pfl.simulation import sweep

# Settings that decide how many client updates a run has.
PARTICIPATION = settings_with("sets_participation")


class Trial(NamedTuple):
    """One method of a grid search: the points of its grid to run, each with several seeds."""

    method: str
    config: ConfigDict  # before the values of a point are applied
    points: Sequence[Point]  # combinations of one value per setting
    grid_size: int  # number of points of the full grid
    registry: Registry = BUILTINS  # components by name


class Job(NamedTuple):
    """A run of a grid search, of one point and one seed, that is missing or unfinished."""

    method: str
    point: Point  # values of the tuned settings, by name
    config: ConfigDict  # all settings, with the values of the point and one seed
    name: str  # of its directory, relative to the folder of the search
    steps: frozenset[int]  # rounds of its checkpoints; empty for a missing run


def cohorts(config: ConfigDict, registry: Registry = BUILTINS) -> list[tuple[int, int]]:
    """Returns (number of rounds, clients per round) of each phase."""
    clients = {"active": config.clients - config.held_out, "held_out": config.held_out}
    return [
        (phase.rounds, phase.clients_per_round or clients[phase.participants])
        for phase in configuration.phases(config, registry)
    ]


def total_rounds(config: ConfigDict, registry: Registry = BUILTINS) -> int:
    """Returns the number of rounds of a run."""
    return sum(rounds for rounds, _ in cohorts(config, registry))


def client_updates(config: ConfigDict, registry: Registry = BUILTINS) -> int:
    """Returns the number of client updates of a run."""
    return sum(rounds * clients for rounds, clients in cohorts(config, registry))


def evaluations(config: ConfigDict, registry: Registry = BUILTINS) -> int:
    """Returns the number of evaluations in the last phase, from which the best is selected."""
    return math.ceil(cohorts(config, registry)[-1][0] / config.eval_every)


def shorten(configs: Mapping[str, ConfigDict], rounds: int, registry: Registry = BUILTINS) -> None:
    """Sets the rounds of all phases of the first method, and of the others in proportion, in place.

    Raises UsageError if methods with equal numbers of client updates would get different ones.
    """
    first, *_ = configs.values()
    old_rounds, old_updates = total_rounds(first, registry), client_updates(first, registry)
    equal = {
        method: cohorts(config, registry)
        for method, config in configs.items()
        if client_updates(config, registry) == old_updates
    }
    for config in configs.values():
        new_rounds = round(rounds * total_rounds(config, registry) / old_rounds)
        _set_rounds(config, max(1, new_rounds), registry)
    counts = {method: client_updates(configs[method], registry) for method in equal}
    expected = client_updates(first, registry)
    for method, count in counts.items():
        if count != expected:
            lengths = [n for phases in equal.values() for n, _ in phases]
            step = math.lcm(*(old_rounds // math.gcd(old_rounds, n) for n in lengths))
            raise UsageError(
                f"{rounds} rounds would give {next(iter(configs))} {expected} client updates and "
                f"{method} {count}, which are equal otherwise; give a multiple of {step}"
            )


def _set_rounds(config: ConfigDict, rounds: int, registry: Registry) -> None:
    """Sets the total rounds of a run in place. Phases keep their shares, at least one round.

    The setting `rounds` is the length of the last phase, so that it can be made longer.

    Raises UsageError if that needs more rounds.
    """
    old = [n for n, _ in cohorts(config, registry)]
    new = [max(1, round(rounds * n / sum(old))) for n in old[:-1]]
    if sum(new) >= rounds:
        raise UsageError(
            f"{config.algorithm} would have {rounds} rounds, too few for {len(old)} phases of "
            f"{old} rounds; give more"
        )
    config.rounds = rounds - sum(new)
    if config.phases:
        *earlier, last = config.phases
        config.phases = (
            *({**phase, "rounds": n} for phase, n in zip(earlier, new, strict=True)),
            {name: value for name, value in last.items() if name != "rounds"},
        )


def equalize_evaluations(configs: Mapping[str, ConfigDict], registry: Registry = BUILTINS) -> None:
    """Gives all methods the same number of evaluations, in place, by changing `eval_every`.

    The number in the last phase counts. It becomes that of the first method, or the largest smaller
    one that all methods can have.
    """
    target = evaluations(next(iter(configs.values())), registry)
    while {evaluations(config, registry) for config in configs.values()} != {target}:
        for config in configs.values():
            if evaluations(config, registry) != target:  # gives at most `target` evaluations
                config.eval_every = math.ceil(cohorts(config, registry)[-1][0] / target)
        target = min(evaluations(config, registry) for config in configs.values())


def check_trials(trials: Sequence[Trial], as_preset: bool = False) -> None:
    """Raises UsageError if the methods cannot be compared or scored.

    With `as_preset`, client updates may differ between methods, as in their presets.
    """
    first, registry = trials[0], trials[0].registry
    if not first.config.validation_fraction and first.config.validation_examples is None:
        raise UsageError(
            "there are no validation examples, by which to choose; set validation_fraction to 0.2"
        )
    counts = {trial.method: client_updates(trial.config, registry) for trial in trials}
    if len(set(counts.values())) > 1 and not as_preset:
        text = ", ".join(f"{method} {count}" for method, count in counts.items())
        raise UsageError(
            f"the methods' runs have different client updates ({text}), and budgets are equal; "
            f"leave {' and '.join(map('config.{}'.format, PARTICIPATION))} to the presets, and "
            "give --rounds=N, which shortens all in proportion"
        )
    problems = [
        comparison.data_settings(configuration.resolve(trial.config, registry)) for trial in trials
    ]
    for trial, problem in zip(trials, problems, strict=True):
        if problem != problems[0]:
            raise UsageError(
                f"the preset gives {trial.method} other examples than {first.method}; set them "
                "with --config.KEY=VALUE"
            )
        for point in trial.points:
            configuration.specify(apply(trial.config, point), registry)


def check_grid(config: ConfigDict, points: Sequence[Point], registry: Registry = BUILTINS) -> None:
    """Raises UsageError for a setting of a method's grid that has an effect at none of its points.

    `points` are all points, also those that a budget leaves out. A setting whose only value is its
    default passes, as in a run.
    """
    values = {
        name: value
        for point in points
        for name, value in point.items()
        if name not in SETTINGS or value != SETTINGS[name].default_value
    }
    applied = [apply(config, point) for point in points]
    try:
        selection.check_used_in_any(selection.nested(values), applied, registry)
        selection.check_not_overridden(selection.nested(values), applied, registry)
    except UsageError as error:
        raise UsageError(f"the grid of {config.algorithm}: {error}") from None


def configs(trial: Trial, seeds: int) -> Iterator[tuple[Point, list[ConfigDict]]]:
    """Yields every point with its configurations, one per seed; `seeds` is their number."""
    for point in trial.points:
        applied = apply(trial.config, point)
        by_seed = [applied.copy_and_resolve_references() for _ in range(seeds)]
        for number, config in enumerate(by_seed):
            config.update(sweep_settings.of_seed(applied, number))
        yield point, by_seed


def collect(trial: Trial, seeds: int, folder: Path) -> list[PointResult]:
    """Returns every point of a trial with its finished runs in `folder`, at most `seeds`."""
    index, results = RunIndex(folder), []
    for point, by_seed in configs(trial, seeds):
        runs = {}
        for config in by_seed:
            _, path = index.find(config, trial.registry)
            if path and (path / "report.html").is_file():
                runs[config.seed] = run_reader.read(path)
        config = by_seed[0].copy_and_resolve_references()
        if seeds > 1 and trial.config.own_partitions:  # not a setting of a single run
            config.update(own_partitions=True, seeds=seeds)
        results.append(PointResult(point=point, config=config, runs=runs, seeds=seeds))
    return results


def run(
    trials: Sequence[Trial],
    seeds: int,
    folder: Path,
    max_runs: int | None,
    stop: interrupt.Stop | None = None,
) -> None:
    """Trains missing runs and resumes unfinished ones, with at most `max_runs` in one program.

    Builds all programs before the first is compiled: errors appear at the start. `seeds` is the
    number of runs of a point; None for `max_runs` means no limit. Writes to `folder`. Raises
    UsageError if the files that a finished run has read have changed since, and Stopped after a
    request to stop, which is `stop` or, by default, Ctrl-C.
    """
    index, count, registry = RunIndex(folder), 0, trials[0].registry
    jobs: dict[str, Job] = {}
    finished: dict[Path, ConfigDict] = {}
    for trial in trials:
        for point, by_seed in configs(trial, seeds):
            count += len(by_seed)
            for config in by_seed:
                key, path = index.find(config, registry)
                if path and (path / "report.html").is_file():
                    finished[path] = config
                    continue
                name, steps = _directory_name(trial.method, point, config.seed, key), set[int]()
                if path:
                    name = str(path.relative_to(folder))
                    steps = {int(p.name) for p in path.glob("checkpoints/*") if p.name.isdigit()}
                job = Job(
                    method=trial.method,
                    point=point,
                    config=config,
                    name=name,
                    steps=frozenset(steps),
                )
                jobs.setdefault(key, job)
    _check_examples(finished, registry)
    with contextlib.ExitStack() as stack:
        stop = stop or stack.enter_context(interrupt.on_keyboard(saves=True))
        programs = [
            part
            for group in _group_compatible(list(jobs.values()))
            for program in _programs(group, registry)
            for part in _split_evenly(program, max_runs)
        ]
        started = sum(bool(job.steps) for job in jobs.values())
        print(
            f"{_count(count, 'run')}: {count - len(jobs)} finished, {started} to resume, "
            f"{len(jobs) - started} to start"
            + (f", in {_count(len(programs), 'program')}" if programs else ""),
            file=sys.stderr,
        )
        for number, program in enumerate(programs, 1):
            line = f"[{number}/{len(programs)}] {program[0].method}: {_count(len(program), 'run')}"
            print(line, file=sys.stderr, flush=True)
            run_configs = {job.name: job.config for job in program}
            runner.run_configs(run_configs, folder, stop, registry=registry)


def _check_examples(finished: Mapping[Path, ConfigDict], registry: Registry) -> None:
    """Raises UsageError if the user's files have changed since a run in `finished` has read them.

    `finished` has configurations by run directory. Each partition of the data is built once.
    """
    facts: dict[str, dict[str, Any]] = {}
    for directory, config in finished.items():
        files = [config.initial_weights, config.speed_trace]
        if not (data.reads_own_files(config.dataset) or any(files)):
            continue
        settings = run_reader.as_json(configuration.resolve(config, registry))
        key = json.dumps([comparison.data_settings(settings), files])
        if key not in facts:
            facts[key] = example_facts(build(config, registry=registry))
        run_directory.check_examples(directory, facts[key])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _group_compatible(jobs: Sequence[Job]) -> list[list[Job]]:
    """Groups runs of one method that can train in one compiled program.

    They differ in seeds and in the settings that `sweep` takes, and have a checkpoint of the same
    round or none.
    """
    groups: dict[str, list[Job]] = {}
    sweepable = settings_with("sweepable")
    for job in jobs:
        fixed = {
            name: value
            for name, value in job.point.items()
            if not isinstance(value, float)
            or not (name in sweepable or name.startswith(f"{job.method}."))
        }
        groups.setdefault(repr((job.method, fixed)), []).append(job)
    return [
        [group[i] for i in indices]
        for group in groups.values()
        for indices in resume.group_by_checkpoint([job.steps for job in group])
    ]


def _programs(jobs: list[Job], registry: Registry = BUILTINS) -> list[list[Job]]:
    """Splits runs of one method into lists that can be compiled as one program each.

    Raises UsageError for invalid settings, or if no client has validation examples.
    """
    try:
        experiment = build(*(job.config for job in jobs), registry=registry)
    except sweep.SeparateRunsError as error:
        groups: dict[tuple[Any, ...], list[Job]] = {}
        for job in jobs:
            values = sweep_settings.setting_values([job.config], error.names).values()
            groups.setdefault(tuple(values), []).append(job)
        if len(groups) < 2:
            raise
        return [program for group in groups.values() for program in _programs(group, registry)]
    except UsageError as error:
        raise UsageError(f"{jobs[0].method}: {error}") from error
    counts = experiment.federation.validation_counts
    if counts is None or not counts[experiment.federation.active].any():
        raise UsageError("no client has validation examples; raise validation_fraction")
    return [jobs]


def _split_evenly(jobs: list[Job], max_runs: int | None) -> list[list[Job]]:
    """Splits runs into parts of at most `max_runs` (None: no limit), as equal as possible."""
    count = math.ceil(len(jobs) / (max_runs or len(jobs)))
    size = math.ceil(len(jobs) / count)
    return [jobs[i : i + size] for i in range(0, len(jobs), size)]


def _directory_name(method: str, point: Point, seed: int, key: str) -> str:
    """Returns the name of a run's directory: method, settings of the point, seed, and `key`.

    `key` is a digest of all settings.
    """
    pairs = [*(f"{name}={format_value(value)}" for name, value in point.items()), f"seed={seed}"]
    safe = "".join(c if c.isalnum() or c in "-_.=," else "_" for c in ",".join(pairs))[:150]
    return f"{method}/{safe}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
