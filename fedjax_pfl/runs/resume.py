"""Saves runs as checkpoints and resumes them."""

import functools
import sys
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core import groups
from fedjax_pfl.core.algorithm import PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import changed_rows, checkpoints
from fedjax_pfl.runs.build import Experiment, fixed_length_reason
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.runs.run_state import Position, SweepRun
from fedjax_pfl.settings.differences import differences, only_adds_rounds
from fedjax_pfl.simulation import ledger, multiprocess, spread, stores, sweep
from fedjax_pfl.simulation.offloaded_rows import part_names, split_state

Restored = tuple[Position, State, State | None]  # position, state, best state


def save_checkpoint(sweep_run: SweepRun, state: State) -> None:
    """Writes a checkpoint of a run. All processes must call this."""
    state = spread.gathered(state)
    if sweep_run.store:
        start = time.perf_counter()
        with sweep_run.writing():
            _write_checkpoint(sweep_run, sweep_run.store, state)
        seconds = sweep_run.last_checkpoint_seconds = time.perf_counter() - start
        total = sweep_run.at.checkpoint_seconds + seconds
        sweep_run.at = sweep_run.at._replace(checkpoint_seconds=total)


def _write_checkpoint(sweep_run: SweepRun, store: checkpoints.Store, state: State) -> None:
    trees = {"state": state} if sweep_run.best is None else {"state": state, "best": sweep_run.best}
    facts = to_facts(sweep_run.at) | {"config": sweep_run.config}
    step, clients = sweep_run.at.round, state.clients
    if not isinstance(clients, stores.ClientStore):
        store.save(step, trees, facts)
        return
    best = None if sweep_run.best is None else sweep_run.best.clients
    # The best state of a run that was resumed from another store has arrays instead of a snapshot.
    best = best if isinstance(best, stores.Snapshot) else None
    saved_rows = changed_rows.write(store.rows, str(step), clients, best)
    trees["state"] = state._replace(clients=())
    if best is not None:
        trees["best"] = trees["best"]._replace(clients=())
    store.save(step, trees, facts | {"rows": saved_rows._asdict()})
    changed_rows.mark_saved(clients, best, saved_rows)
    files = sweep_run.files | {step: [*saved_rows.files]}
    sweep_run.files = {
        kept: files[kept] if kept in files else _row_files(store, kept) for kept in store.steps()
    }
    changed_rows.remove_unused(store.rows, sweep_run.files.values())


def _row_files(store: checkpoints.Store, step: int) -> list[str]:
    """Returns the files of rows that an earlier checkpoint needs."""
    try:
        return list((store.facts(step).get("rows") or {}).get("files", ()))
    except checkpoints.DamagedError:
        return []


def can_save_checkpoint(sweep_runs: Sequence[SweepRun]) -> bool:
    """Returns True if checkpoints, with one more of each run, take at most 5 % of the time."""
    saving = sum(run.at.checkpoint_seconds + run.last_checkpoint_seconds for run in sweep_runs)
    return saving <= sum(run.at.seconds for run in sweep_runs) / 20


def to_facts(at: Position) -> dict[str, Any]:
    """Returns a position as plain data for a checkpoint."""
    return at._asdict() | {"ledger": at.ledger._asdict()}


def _position(facts: Mapping[str, Any]) -> Position:
    return Position(**facts)._replace(ledger=ledger.from_json(facts["ledger"]))


def group_by_checkpoint(steps: Sequence[Set[int]]) -> list[list[int]]:
    """Groups runs that can be resumed from the same round or started together.

    Args:
      steps: Rounds of the checkpoints of each run.

    Returns:
      Groups of indices into `steps`.
    """
    merged: list[tuple[Set[int], list[int]]] = []
    for i, run_steps in enumerate(steps):
        for n, (common, group) in enumerate(merged):
            if common & run_steps or not common | run_steps:
                merged[n] = common & run_steps, [*group, i]
                break
        else:
            merged.append((run_steps, [i]))
    return [group for _, group in merged]


def resume(experiment: Experiment, sweep_runs: Sequence[SweepRun]) -> list[State] | None:
    """Resumes the runs of a program at the newest round of which all have an intact checkpoint.

    Sets the position and the best state of each run.

    Returns:
      The state of each run, or None if there is no checkpoint.
    """
    states = _restore_all(experiment, sweep_runs) if multiprocess.lead() else None
    facts = multiprocess.agree(states and [to_facts(sweep_run.at) for sweep_run in sweep_runs])
    if facts is None or multiprocess.count() == 1:
        return states
    template = state_templates(experiment)[facts[0]["phase"]]
    for sweep_run, run_facts in zip(sweep_runs, facts, strict=True):
        sweep_run.at = _position(run_facts)
        sweep_run.resumed_at = sweep_run.at.round
    with_best = [sweep_run for sweep_run in sweep_runs if sweep_run.at.best_round is not None]
    saved = states, [sweep_run.best for sweep_run in with_best]
    if not multiprocess.lead():
        zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), template)
        saved = [zeros] * len(sweep_runs), [zeros] * len(with_best)
    states, best_states = multiprocess.broadcast(saved)
    for sweep_run, best in zip(with_best, best_states, strict=True):
        sweep_run.best = best
    return list(states)


def _restore_all(experiment: Experiment, sweep_runs: Sequence[SweepRun]) -> list[State] | None:
    """Does the work of `resume` in process 0."""
    templates = state_templates(experiment)
    common = set.intersection(
        *(set(run.store.steps()) if run.store else set() for run in sweep_runs)
    )
    damaged: list[tuple[int, SweepRun, str]] = []
    for step in sorted(common, reverse=True):
        restored = []
        for sweep_run in sweep_runs:
            try:
                assert sweep_run.store is not None
                restored.append(
                    restore(experiment, sweep_run.store, templates, step, sweep_run.config)
                )
            except checkpoints.DamagedError as error:
                damaged.append((step, sweep_run, str(error)))
                break
        else:
            return _apply(sweep_runs, restored, step, damaged)
    for step, sweep_run, reason in damaged[:1]:
        folder = sweep_run.store and sweep_run.store.folder
        raise UsageError(
            f"all checkpoints in {folder} are damaged (round {step}: {reason}); restore one from a "
            "copy, or delete that folder to start again"
        )
    return None


def _apply(
    sweep_runs: Sequence[SweepRun],
    restored: Sequence[Restored],
    step: int,
    damaged: Sequence[tuple[int, SweepRun, str]],
) -> list[State]:
    """Sets all runs to the restored round, reports damage and drops later checkpoints."""
    for later, sweep_run, reason in damaged:
        name = f" of {sweep_run.name}" if sweep_run.name else ""
        print(
            f"The checkpoint of round {later}{name} is damaged: {reason}. Resuming from round "
            f"{step}.",
            file=sys.stderr,
        )
    for sweep_run in sweep_runs:
        for later in sweep_run.store.steps() if sweep_run.store else []:
            if later > step:
                sweep_run.store.drop(later)  # type: ignore[union-attr]
    for sweep_run, (at, _, best) in zip(sweep_runs, restored, strict=True):
        sweep_run.at, sweep_run.best, sweep_run.resumed_at = at, best, at.round
    return [state for _, state, _ in restored]


def state_templates(experiment: Experiment) -> list[PyTree]:
    """Returns the shapes of one run's state in each phase."""
    templates, state = [], None
    for phase in experiment.phases:
        state = jax.eval_shape(phase.rounds.init, phase.key, state)
        is_sweep = isinstance(phase.key, sweep.Points)
        templates.append(sweep.shapes_of_one(state) if is_sweep else state)
    return templates


def restore(
    experiment: Experiment,
    store: checkpoints.Store,
    templates: Sequence[PyTree],
    step: int,
    config: Mapping[str, Any],
) -> Restored:
    """Restores a checkpoint.

    Raises DamagedError if it is damaged, and UsageError if it belongs to a run whose settings give
    other results.

    Args:
      experiment: Phases of the run.
      store: Checkpoints of the run.
      templates: Result of `state_templates`.
      step: Round of the checkpoint.
      config: Resolved configuration of the run.
    """
    store.check(step)
    facts = store.facts(step)
    saved_config = facts.pop("config")
    changes = differences(saved_config, config)
    is_longer = only_adds_rounds(saved_config, config)
    reason = fixed_length_reason(experiment) if changes and is_longer else ""
    if changes and (reason or not is_longer):
        raise UsageError(
            f"{store.folder} holds a checkpoint of a run with other settings: "
            f"{'; '.join(changes)}{reason and f'; it cannot be resumed, because {reason}'}; "
            "restore this run's checkpoints from a copy, or delete that folder to start again"
        )
    rows = facts.pop("rows", None)
    at = _position(facts)
    wanted = {"state": templates[at.phase]}
    if at.best_round is not None:
        wanted["best"] = templates[at.phase]
    if rows is None:
        trees = store.restore(step, wanted)
        return at, trees["state"], trees.get("best")
    saved_rows = changed_rows.from_json(rows)
    changed_rows.check(store.rows, saved_rows)
    phase = experiment.phases[at.phase]
    rest, client_templates = split_state(phase.algorithm, templates[at.phase])
    wanted |= dict.fromkeys(wanted if saved_rows.best is not None else ("state",), rest)
    trees = store.restore(step, wanted)
    clients, best_clients = _read_clients(phase, saved_rows, client_templates, store)
    state, best = trees["state"]._replace(clients=clients), trees.get("best")
    if best_clients is not None and best is not None:
        best = best._replace(clients=best_clients)
    if phase.store in ("device", "sharded"):
        return at, stores.to_arrays(state), best and stores.to_arrays(best)
    return at, state, best


def _read_clients(
    phase: Phase,
    saved_rows: changed_rows.SavedRows,
    templates: Sequence[PyTree],
    store: checkpoints.Store,
) -> tuple[stores.ClientStore, stores.Snapshot | None]:
    """Reads the clients of a checkpoint, and those of the best round."""
    make = functools.partial(
        stores.RowStore,
        clients=phase.federation.clients,
        store="disk" if phase.store == "disk" else "host",
        folder=store.folder.parent,
    )
    return changed_rows.read(
        store.rows,
        saved_rows,
        templates,
        groups.has_groups(phase.algorithm),
        make,
        part_names(phase.algorithm),
    )
