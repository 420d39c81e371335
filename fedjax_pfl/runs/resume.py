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
from fedjax_pfl.runs.build import Experiment, fixed_length
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.runs.run_state import Position, SweepRun
from fedjax_pfl.settings.differences import differences, only_adds_rounds
from fedjax_pfl.simulation import ledger, multiprocess, spread, stores, sweep
from fedjax_pfl.simulation.offloaded_rows import part_names, split_state


def save_checkpoint(sweep_run: SweepRun, state: State) -> None:
    """Write a checkpoint of where it stands; where there are several processes, all call this."""
    state = spread.gathered(state)
    if sweep_run.store:
        began = time.perf_counter()
        with sweep_run.writing():
            _write_checkpoint(sweep_run, sweep_run.store, state)
        took = sweep_run.last_checkpoint_seconds = time.perf_counter() - began
        total = sweep_run.at.checkpoint_seconds + took
        sweep_run.at = sweep_run.at._replace(checkpoint_seconds=total)


def _write_checkpoint(sweep_run: SweepRun, store: checkpoints.Store, state: State) -> None:
    saved = {"state": state} if sweep_run.best is None else {"state": state, "best": sweep_run.best}
    facts, clients = to_facts(sweep_run.at) | {"config": sweep_run.config}, state.clients
    if not isinstance(clients, stores.ClientStore):
        store.save(sweep_run.at.round, saved, facts)
        return
    best = None if sweep_run.best is None else sweep_run.best.clients
    best = best if isinstance(best, stores.Snapshot) else None  # else from a run on the device
    now = changed_rows.write(store.rows, str(sweep_run.at.round), clients, best)
    saved["state"] = state._replace(clients=())
    if best is not None:
        saved["best"] = saved["best"]._replace(clients=())
    store.save(sweep_run.at.round, saved, facts | {"rows": now._asdict()})
    changed_rows.done(clients, best, now)
    steps = store.steps()
    known = sweep_run.files | {sweep_run.at.round: [*now.files]}
    sweep_run.files = {
        step: known[step] if step in known else _files_of(store, step) for step in steps
    }
    changed_rows.clear(store.rows, sweep_run.files.values())


def _files_of(store: checkpoints.Store, step: int) -> list[str]:
    """Those that an earlier checkpoint needs."""
    try:
        return list((store.facts(step).get("rows") or {}).get("files", ()))
    except checkpoints.DamagedError:
        return []


def can_save_checkpoint(sweep_runs: Sequence[SweepRun]) -> bool:
    """Whether one more checkpoint of each keeps all of them to a twentieth of the time."""
    saving = sum(m.at.checkpoint_seconds + m.last_checkpoint_seconds for m in sweep_runs)
    return saving <= sum(m.at.seconds for m in sweep_runs) / 20


def to_facts(at: Position) -> dict[str, Any]:
    """As a checkpoint holds it."""
    return at._asdict() | {"ledger": at.ledger._asdict()}


def _position(facts: Mapping[str, Any]) -> Position:
    return Position(**facts)._replace(ledger=ledger.from_json(facts["ledger"]))


def group_by_checkpoint(steps: Sequence[Set[int]]) -> list[list[int]]:
    """By the rounds that runs have checkpoints of: those that can go on, or begin, together."""
    groups: list[tuple[Set[int], list[int]]] = []
    for i, own in enumerate(steps):
        for n, (common, group) in enumerate(groups):
            if common & own or not common | own:
                groups[n] = common & own, [*group, i]
                break
        else:
            groups.append((own, [i]))
    return [group for _, group in groups]


def resume(experiment: Experiment, sweep_runs: Sequence[SweepRun]) -> list[State] | None:
    """The states of a program's runs at the newest checkpoint that is whole in all, or None."""
    found = _restore_all(experiment, sweep_runs) if multiprocess.lead() else None
    facts = multiprocess.agree(found and [to_facts(sweep_run.at) for sweep_run in sweep_runs])
    if facts is None or multiprocess.count() == 1:
        return found
    template = state_templates(experiment)[facts[0]["phase"]]
    for sweep_run, one in zip(sweep_runs, facts, strict=True):
        sweep_run.at = _position(one)
        sweep_run.resumed_at = sweep_run.at.round
    kept = [sweep_run for sweep_run in sweep_runs if sweep_run.at.best_round is not None]
    saved = found, [sweep_run.best for sweep_run in kept]
    if not multiprocess.lead():
        empty = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), template)
        saved = [empty] * len(sweep_runs), [empty] * len(kept)
    states, best = multiprocess.broadcast(saved)
    for sweep_run, one in zip(kept, best, strict=True):
        sweep_run.best = one
    return list(states)


def _restore_all(experiment: Experiment, sweep_runs: Sequence[SweepRun]) -> list[State] | None:
    shapes = state_templates(experiment)
    common = set.intersection(*(set(m.store.steps()) if m.store else set() for m in sweep_runs))
    damaged: list[tuple[int, SweepRun, str]] = []
    for step in sorted(common, reverse=True):
        found = []
        for sweep_run in sweep_runs:
            try:
                assert sweep_run.store is not None
                found.append(restore(experiment, sweep_run.store, shapes, step, sweep_run.config))
            except checkpoints.DamagedError as error:
                damaged.append((step, sweep_run, str(error)))
                break
        else:
            return _apply(sweep_runs, found, step, damaged)
    for step, sweep_run, reason in damaged[:1]:
        folder = sweep_run.store and sweep_run.store.folder
        raise UsageError(
            f"all checkpoints in {folder} are damaged (round {step}: {reason}); bring one back "
            "from a copy, or delete that folder to start again"
        )
    return None


def _apply(
    sweep_runs: Sequence[SweepRun],
    found: Sequence[tuple[Position, State, State | None]],
    step: int,
    damaged: Sequence[tuple[int, SweepRun, str]],
) -> list[State]:
    for worse, sweep_run, reason in damaged:
        which = f" of {sweep_run.name}" if sweep_run.name else ""
        print(
            f"The checkpoint of round {worse}{which} is damaged: {reason}. Going on from round "
            f"{step}.",
            file=sys.stderr,
        )
    _drop_later_lines(sweep_runs, step)
    for sweep_run, (at, _, best) in zip(sweep_runs, found, strict=True):
        sweep_run.at, sweep_run.best, sweep_run.resumed_at = at, best, at.round
    return [state for _, state, _ in found]


def state_templates(experiment: Experiment) -> list[PyTree]:
    """The shapes of one run's state at the end of each phase."""
    found, state = [], None
    for phase in experiment.phases:
        state = jax.eval_shape(phase.rounds.init, phase.points, state)
        found.append(
            sweep.shapes_of_one(state) if isinstance(phase.points, sweep.Points) else state
        )
    return found


def restore(
    experiment: Experiment,
    store: checkpoints.Store,
    templates: Sequence[PyTree],
    step: int,
    config: Mapping[str, Any],
) -> tuple[Position, State, State | None]:
    """Where a run stood, its state, and its best one by validation; or DamagedError.

    UsageError where the run that it is of had other settings, in what decides results.
    """
    store.check(step)
    facts = store.facts(step)
    there = facts.pop("config")
    different = differences(there, config)
    longer = only_adds_rounds(there, config)  # as its directory may have been made
    why = fixed_length(experiment) if different and longer else ""
    if different and (why or not longer):
        raise UsageError(
            f"{store.folder} holds a checkpoint of a run with other settings: "
            f"{'; '.join(different)}{why and f'; it cannot be gone on from, because {why}'}; bring "
            "its own ones back from a copy, or delete that folder to start again"
        )
    rows = facts.pop("rows", None)
    at = _position(facts)
    wanted = {"state": templates[at.phase]}
    if at.best_round is not None:
        wanted["best"] = templates[at.phase]
    if rows is None:
        found = store.restore(step, wanted)
        return at, found["state"], found.get("best")
    now = changed_rows.described(rows)
    changed_rows.check(store.rows, now)
    phase = experiment.phases[at.phase]
    rest, each = split_state(phase.algorithm, templates[at.phase])
    wanted |= dict.fromkeys(wanted if now.best is not None else ("state",), rest)
    found = store.restore(step, wanted)
    clients, best = _clients(phase, now, each, store)
    state, best_state = found["state"]._replace(clients=clients), found.get("best")
    if best is not None and best_state is not None:
        best_state = best_state._replace(clients=best)
    if phase.store in ("device", "sharded"):
        return at, stores.to_arrays(state), best_state and stores.to_arrays(best_state)
    return at, state, best_state


def _clients(
    phase: Phase, now: changed_rows.Described, each: Sequence[PyTree], store: checkpoints.Store
) -> tuple[stores.ClientStore, stores.Snapshot | None]:
    """What a checkpoint holds of them, and of those of the best round."""
    kind = "disk" if phase.store == "disk" else "host"
    make = functools.partial(
        stores.RowStore, clients=phase.federation.clients, store=kind, folder=store.folder.parent
    )
    several, offload = groups.has_groups(phase.algorithm), part_names(phase.algorithm)
    return changed_rows.read(store.rows, now, each, several, make, offload)


def _drop_later_lines(sweep_runs: Sequence[SweepRun], after: int) -> None:
    """Remove checkpoints of later rounds, which are computed again."""
    for sweep_run in sweep_runs:
        for step in sweep_run.store.steps() if sweep_run.store else []:
            if step > after:
                sweep_run.store.drop(step)  # type: ignore[union-attr]
