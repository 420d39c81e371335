"""Saves runs as checkpoints and resumes them."""

import functools
import sys
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core import groups
from fedjax_pfl.core.algorithm import PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import changed_rows, checkpoints
from fedjax_pfl.runs.build import Experiment, fixed_length_reason
from fedjax_pfl.runs.run_state import Position, SweepRun
from fedjax_pfl.settings.differences import obstacle
from fedjax_pfl.simulation import ledger, multiprocess, spread, stores, sweep
from fedjax_pfl.simulation.offloaded_rows import part_names, split_state

Restored = tuple[Position, State, State | None]  # position, state, best state


def save_checkpoint(sweep_run: SweepRun, state: State) -> None:
    """Writes a checkpoint with `state`, one run's, if the run has a directory; counts its seconds.

    All processes must call this.
    """
    state = spread.gathered(state)
    if sweep_run.store:
        start = time.perf_counter()
        with sweep_run.writing():
            _write_checkpoint(sweep_run, sweep_run.store, state)
        seconds = sweep_run.last_checkpoint_seconds = time.perf_counter() - start
        total = sweep_run.at.checkpoint_seconds + seconds
        sweep_run.at = sweep_run.at._replace(checkpoint_seconds=total)


def _write_checkpoint(sweep_run: SweepRun, store: checkpoints.Store, state: State) -> None:
    """Writes position, state and best state, and of off-device rows only those that changed."""
    trees = {"state": state} if sweep_run.best is None else {"state": state, "best": sweep_run.best}
    facts = to_facts(sweep_run.at) | {"config": sweep_run.config}
    step, clients = sweep_run.at.round, state.clients
    if not isinstance(clients, stores.ClientStore):
        store.save(step, trees, facts)
        if store.rows.is_dir() and multiprocess.lead():  # of a store that was used before
            changed_rows.remove_unused(store.rows, [_row_files(store, n) for n in store.steps()])
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
    sweep_run.files = {n: files[n] if n in files else _row_files(store, n) for n in store.steps()}
    changed_rows.remove_unused(store.rows, sweep_run.files.values())


def _row_files(store: checkpoints.Store, step: int) -> list[str]:
    """Returns names of files of rows that the checkpoint of round `step` needs; [] if damaged."""
    try:
        return list((store.facts(step).get("rows") or {}).get("files", ()))
    except checkpoints.DamagedError:
        return []


def can_save_checkpoint(sweep_runs: Sequence[SweepRun]) -> bool:
    """Returns True if checkpoints, with one more of each run, take at most 5 % of training time."""
    seconds = sum(run.at.checkpoint_seconds + run.last_checkpoint_seconds for run in sweep_runs)
    return seconds <= sum(run.at.seconds for run in sweep_runs) / 20


def to_facts(at: Position) -> dict[str, Any]:
    """Returns a position as plain data for a checkpoint."""
    return at._asdict() | {"ledger": at.ledger._asdict()}


def _position(facts: Mapping[str, Any]) -> Position:
    """Returns the position of `to_facts`; DamagedError if another version has written it."""
    try:
        return Position(**facts)._replace(ledger=ledger.from_json(facts["ledger"]))
    except (KeyError, TypeError) as error:
        raise checkpoints.DamagedError(
            "its facts are not those that this version of fedjax_pfl writes"
        ) from error


def group_by_checkpoint(steps: Sequence[Set[int]]) -> list[list[int]]:
    """Groups runs that can be resumed from the same round or started together.

    `steps` has the rounds of the checkpoints of each run. Returns groups of indices into `steps`:
    runs of a group have a round in common, or no checkpoint.
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

    Sets the position, the best state and `resumed_at` of each run. Returns the state of each run,
    or None if there is no checkpoint.
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
    """Restores the runs for `resume`, in process 0.

    Removes checkpoints newer than the restored ones. Prints which checkpoints are damaged; raises
    UsageError if all are.
    """
    stores = [sweep_run.store for sweep_run in sweep_runs if sweep_run.store]
    if len(stores) < len(sweep_runs):
        return None
    templates, damaged = state_templates(experiment), list[tuple[str, str]]()
    for step in sorted(set.intersection(*(set(store.steps()) for store in stores)), reverse=True):
        restored = []
        for sweep_run, store in zip(sweep_runs, stores, strict=True):
            try:
                folder, config = sweep_run.directory, sweep_run.config
                restored.append(restore(experiment, store, templates, step, config, folder))
            except checkpoints.DamagedError as error:
                name = f" of {sweep_run.name}" if sweep_run.name else ""
                damaged.append((f"round {step}{name}", str(error)))
                break
        if len(restored) < len(sweep_runs):
            continue
        for later, reason in damaged:
            line = f"The checkpoint of {later} is damaged: {reason}. Resuming from round {step}."
            print(line, file=sys.stderr)
        for sweep_run, store, (at, _, best) in zip(sweep_runs, stores, restored, strict=True):
            for number in store.steps():
                if number > step:
                    store.drop(number)
            sweep_run.at, sweep_run.best, sweep_run.resumed_at = at, best, at.round
        return [state for _, state, _ in restored]
    if damaged:
        raise UsageError(
            f"all checkpoints in {stores[0].folder} are damaged ({': '.join(damaged[0])}); restore "
            "one from a copy, or delete that folder to start again"
        )
    return None


def state_templates(experiment: Experiment) -> list[PyTree]:
    """Returns the state of one run in each phase, with shapes and dtypes instead of arrays."""
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
    folder: Path | None = None,
) -> Restored:
    """Restores the checkpoint of round `step`, with shapes from `state_templates`.

    Client-side state on disk goes to a file in `folder`; None: in the one of temporary files.

    Raises DamagedError if it is damaged, and UsageError if it belongs to a run whose settings give
    other results than `config`, the resolved configuration.
    """
    store.check(step)
    facts = store.facts(step)
    saved_config = facts.pop("config")
    if problem := obstacle(saved_config, config, lambda: fixed_length_reason(experiment)):
        raise UsageError(
            f"{store.folder} holds a checkpoint of a run with other settings: {problem}; restore "
            "this run's checkpoints from a copy, or delete that folder to start again"
        )
    rows = facts.pop("rows", None)
    at = _position(facts)
    template = templates[at.phase]
    names = ["state"] if at.best_round is None else ["state", "best"]
    if rows is None:
        trees = store.restore(step, dict.fromkeys(names, template))
        return at, trees["state"], trees.get("best")
    saved_rows = changed_rows.from_json(rows)
    changed_rows.check_files(store.rows, saved_rows)
    phase = experiment.phases[at.phase]
    shared_template, client_templates = split_state(phase.algorithm, template)
    best_template = template if saved_rows.best is None else shared_template
    trees = store.restore(
        step, {name: shared_template if name == "state" else best_template for name in names}
    )
    make = functools.partial(
        stores.RowStore,
        clients=phase.federation.clients,
        store="disk" if phase.store == "disk" else "host",
        folder=folder,
    )
    clients, best_clients = changed_rows.read(
        store.rows,
        saved_rows,
        client_templates,
        has_groups=groups.has_groups(phase.algorithm),
        make=make,
        offload=part_names(phase.algorithm),
    )
    state, best = trees["state"]._replace(clients=clients), trees.get("best")
    if best_clients is not None and best is not None:
        best = best._replace(clients=best_clients)
    if phase.store in ("device", "sharded"):
        return at, stores.to_arrays(state), best and stores.to_arrays(best)
    return at, state, best
