"""Measures peak memory and time of a client step against the number of clients.

python -m experiments.many_clients --clients=100,10000,1000000 --methods=fedper,local --store=disk

Each number of clients runs in its own process: LeNet on 32x32x3 images, or with --model=mlp the MLP
on 8x8 images. A client has 40 training and 10 test images, sampled from a shared pool of 20,000,
and takes two steps of 20 per round, in cohorts of 100. One round warms up; then follow --rounds
rounds and an evaluation. The same step with ten clients on the device runs in turns with them.
Times are CPU seconds of all cores, which excludes other work on the machine.

--server measures instead what part of a round of LeNet the server takes, with all cores and 20
steps of 32 images per client; see `experiments.libraries.server_share`.

python -m experiments.many_clients --server --methods=pfedla --clients=10,1000 --cohort=1000
                                   --rounds=2 --store=sharded

--pfllib=CHECKOUT and --fl_bench=CHECKOUT measure instead the memory that those libraries need for
two rounds of FedAvg on LeNet, up to --most GiB each.

What a file has is not measured again, unless it failed or had other --rounds or --written.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.flag_checks import refuse_unread, require_folders
from experiments.libraries import rivals, server_share
from experiments.libraries.pool_rounds import BATCH, CALL, MODELS, POOL, TRAIN, make_functions
from experiments.libraries.rivals import Child, Gone
from experiments.libraries.work import Work, parameters, peak_memory
from fedjax_pfl.cli.command import run_script
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.networks import LeNet
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation.devices import prepare_devices
from fedjax_pfl.simulation.on_device import DeviceProgram
from fedjax_pfl.simulation.programs import STORES
from fedjax_pfl.simulation.rounds import compile_rounds
from fedjax_pfl.simulation.stores import ClientStore
from fedjax_pfl.simulation.streamed import StreamedProgram

_STEPS = TRAIN // BATCH
COHORT = 100  # also of recorded rows that do not state it
_FOLDER = os.environ.get("TMPDIR")
_LIBRARIES = ("pfllib", "fl_bench")
_SETTINGS: dict[str, dict[str, Any]] = {
    "pfedhn": {"embedding": 64},
    "pfedla": {"candidates": 10, "embedding": 16, "hidden": 16, "depth": 1},
}


def measure(
    method: str,
    clients: int,
    cohort: int,
    rounds: int,
    store: str,
    written: int,
    model: str = "lenet",
) -> dict[str, Any]:
    """Measures bytes, and CPU seconds of a client step and of an evaluation, in this process.

    Returns the entry of the results file. `written` clients have state in the store before the
    first round.
    """
    settings = _SETTINGS.get(method, {})
    few, few_data = make_functions(method, 10, 10, model, settings=settings)
    few_program: Any = DeviceProgram(compile_rounds(few), jax.random.key(0), few_data)
    few_state = few_program.enter(few_program.init())
    few_program.compile(few_state, 0)
    few_state, _ = few_program.run(few_state, 0, 1)

    functions, data = make_functions(method, clients, cohort, model, settings=settings)
    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
        program: Any = DeviceProgram(compile_rounds(functions), jax.random.key(0), data)
        if store != "device":
            program = StreamedProgram(
                functions, jax.random.key(0), data, store=store, folder=Path(folder)
            )
        del data
        state = program.enter(program.init())
        stored_clients = state.clients if isinstance(state.clients, ClientStore) else None
        for ids in (
            stored_clients.groups[0].blocks(np.arange(written))
            if stored_clients is not None
            else ()
        ):
            state.clients.put(0, ids, state.clients.records(0, ids))
        program.compile(state, 0)
        state, _ = program.run(state, 0, 1)
        seconds, few_seconds = [], []
        for n in range(1, rounds + 1):  # in turns, because other work on the machine slows both
            start = time.process_time()
            few_state, _ = few_program.run(few_state, n, CALL)
            few_seconds.append(time.process_time() - start)
            start = time.process_time()
            state, _ = program.run(state, n, 1)
            seconds.append(time.process_time() - start)
        start = time.process_time()
        program.evaluate(state, 1 + rounds)
        evaluation = time.process_time() - start
    cohort = min(cohort, clients)
    return {
        "clients": clients,
        "peak": peak_memory(),
        "step": float(np.median(seconds)) / cohort / _STEPS,
        "few_step": float(np.median(few_seconds)) / 10 / CALL / _STEPS,
        "rounds_between": float(np.median(seconds)) * CALL,
        "evaluation": evaluation,
        "written": stored_clients.written_bytes() if stored_clients else 0,
        "store": store,
    }


def measure_library(
    command: Sequence[str], checkout: str, clients: int, cohort: int, most: float, limit: float
) -> dict[str, Any]:
    """Measures the peak in bytes of another library that trains two cohorts by FedAvg.

    Its process may have `most` GiB and take `limit` seconds per answer. Raises Gone if it fails.
    """
    few = min(cohort, clients)
    work = Work("", clients=clients, cohort=few, examples=TRAIN, batch=BATCH)
    spec = {**work.spec(parameters(LeNet(outputs=10))), "pool": POOL, "checkout": checkout}
    child = Child(command, spec, limit)
    try:
        if hasattr(resource, "prlimit"):  # before its imports
            resource.prlimit(child.pid, resource.RLIMIT_DATA, (int(most * 2**30),) * 2)
        child.wait_until_ready()
        child.go()
        return {"clients": clients, "peak": peak_memory(child.pid)}
    finally:
        child.close()


def measure_libraries(
    keys: Sequence[str], results: dict[str, list[dict[str, Any]]], out: Path
) -> None:
    """Measures libraries with more and more clients, each until it fails.

    `results`, rows by label, is extended in place and written to `out`.
    """
    flag: Any = flags.FLAGS
    for key in keys:
        checkout = rivals.checkout(key, flag[key].value)
        python = rivals.python(f"{key}_python", flag[f"{key}_python"].value)
        command = [python, str(rivals.ADAPTERS / rivals.RIVALS[key].script)]
        rows = results.setdefault(f"{rivals.NAMES[key]}, fedavg", [])
        for clients in sorted(map(int, flag.clients)):
            if any(row["clients"] == clients and row["ok"] for row in rows):
                print(f"{key}, {clients} clients: {out} has it, not measured again")
                continue
            arguments = (clients, flag.cohort, flag.most, flag.limit)
            facts = {"cohort": flag.cohort, "commit": rivals.commit(checkout)}
            row: dict[str, Any] = {"clients": clients, **facts}
            try:
                row |= measure_library(command, checkout, *arguments)
                print(f"{key}, {clients} clients: {row['peak'] / 2**30:.2f} GiB", flush=True)
            except Gone as reason:
                row["why"] = str(reason)
                print(f"{key}, {clients} clients: {reason}", flush=True)
            rows[:] = [old for old in rows if old["clients"] != clients]
            rows.append({**row, "ok": "why" not in row})
            out.write_text(json.dumps(results, indent=2) + "\n")
            if "why" in row:  # it fails with more clients, too
                break


def refuse_flags(flag_values: Any, libraries: Sequence[str]) -> None:
    """Raises UsageError for a flag that has no effect on the selected measurement."""
    if flag_values.server:
        refuse_unread(flag_values, [*_LIBRARIES, "model", "written", "picture"], "with --server")
        if "pfedla" not in flag_values.methods:
            refuse_unread(flag_values, ["hidden"], "without pfedla in --methods")
    else:
        refuse_unread(flag_values, ["hidden"], "without --server")
        if flag_values.store == "device":
            refuse_unread(flag_values, ["written"], "with --store=device")
    for key in _LIBRARIES:
        if key not in libraries:
            refuse_unread(flag_values, [f"{key}_python"], f"without --{key}")
    if libraries:
        names = ("methods", "model", "store", "rounds", "written")
        refuse_unread(flag_values, names, f"with --{libraries[0]}")
    else:
        refuse_unread(flag_values, ["most", "limit"], "without another library")
        if flag_values.store == "sharded" and not flag_values.server:
            raise UsageError("--store=sharded is measured with --server; choose another store")


def read_results(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of a results file by label, {} if there is none; UsageError if damaged."""
    try:
        results: dict[str, list[dict[str, Any]]] = json.loads(out.read_text())
        curves(results)
        return results
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UsageError(f"{out} has no results of this command; give another --out") from None


def require_cohort(results: dict[str, list[dict[str, Any]]], cohort: int, out: Path) -> None:
    """Raises UsageError if results in the file `out` were measured with another cohort."""
    for label, rows in results.items():
        for row in rows:
            if (recorded := row.get("cohort", COHORT)) != cohort:
                raise UsageError(
                    f"{out} has results of {label} with cohort {recorded}, not {cohort}; "
                    "give another --out"
                )


def curves(results: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the successful rows of each curve by its label, sorted by number of clients.

    If a label has rows of several stores, each store has its own curve.
    """
    curves_by_label = {}
    for label, rows in results.items():
        stores = dict.fromkeys(row.get("store") for row in rows)  # None: another library
        for store in stores:
            name = label if len(stores) == 1 else f"{label}, {store}"
            of_store = (row for row in rows if row["ok"] and row.get("store") == store)
            curves_by_label[name] = sorted(of_store, key=lambda row: row["clients"])
    return curves_by_label


def _row_key(row: Mapping[str, Any]) -> tuple[int, str, int]:
    """Returns (clients, store, cohort), which identifies a row of a label."""
    return row["clients"], row["store"], row.get("cohort", COHORT)


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws peak memory and the time of a step against the number of clients, and saves it."""
    from matplotlib import pyplot

    figure, (memory, step) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    figure.set_facecolor("white")
    for label, rows in curves(results).items():
        clients = [row["clients"] for row in rows]
        is_timed = all("step" in row for row in rows)
        peaks = [row["peak"] / 2**30 for row in rows]
        (line,) = memory.loglog(clients, peaks, "o-" if is_timed else "x:", label=label)
        if is_timed:
            times = [row["step"] / row["few_step"] for row in rows]
            step.loglog(clients, times, "o-", color=line.get_color())
    memory.axhline(8, color="0.6", linewidth=1)
    memory.set(xlabel="clients", ylabel="peak resident memory, GiB")
    memory.set_yticks(ticks := [0.5, 1, 2, 4, 8, 16], [f"{tick:g}" for tick in ticks])
    memory.minorticks_off()
    step.axhline(1.15, color="0.6", linewidth=1)
    step.set(xlabel="clients", ylabel="client step, relative to ten clients")
    step.set_yticks(ticks := [0.5, 1, 2, 4, 8], [f"{tick:g}" for tick in ticks])
    step.minorticks_off()
    memory.legend(loc="upper left", fontsize="small", frameon=False)
    with pyplot.rc_context({"svg.hashsalt": "many_clients"}):
        figure.savefig(path, metadata={"Date": None})  # the same numbers make the same file
    pyplot.close(figure)


def main(argv: Sequence[str]) -> None:
    """Measures each size in its own process; skips sizes that the file contains."""
    flag_values = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; see --help")
    libraries = [key for key in _LIBRARIES if flag_values[key].value]
    if flag_values.only:
        method, _, clients = flag_values.only.partition(":")
        if method not in configuration.ALGORITHMS or not clients.isdecimal():
            raise UsageError(f"--only={flag_values.only} is not METHOD:CLIENTS")
        options: list[Any] = [flag_values[name].value for name in _PASSED]
        if flag_values.server:
            prepare_devices()
            cohort, rounds, store = options[:3]
            row = server_share.measure(
                method, int(clients), cohort, rounds, store, flag_values.hidden
            )
        else:
            row = measure(method, int(clients), *options)
        print(json.dumps(row))
        return
    refuse_flags(flag_values, libraries)
    unknown = sorted(set(flag_values.methods) - set(configuration.ALGORITHMS))
    if unknown:
        raise UsageError(f"--methods has {', '.join(unknown)}; see fedjax-pfl list methods")
    for text in flag_values.clients:
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"--clients has {text!r}; give whole numbers from 1")
    require_folders(flag_values, "out", *(() if flag_values.server else ("picture",)))
    name = "server_share" if flag_values.server else "many_clients"
    out = Path(flag_values.out or f"experiments/results/{name}.json")
    results = read_results(out)
    if not flag_values.server:
        require_cohort(results, flag_values.cohort, out)
    measure_libraries(libraries, results, out)
    methods = [] if libraries else flag_values.methods
    for clients in flag_values.clients:
        for method in methods:
            label = method if flag_values.model == "lenet" else f"{method}, {flag_values.model}"
            if (
                flag_values.server
                and method == "pfedla"
                and not flag_values["hidden"].using_default_value
            ):
                label += f", {flag_values.hidden} hidden units"
            rows = results.setdefault(label, [])
            cohort = flag_values.cohort
            if flag_values.server:  # as `server_share.measure` returns it
                cohort = min(cohort, int(clients))
            row_key = (int(clients), flag_values.store, cohort)
            conditions = {"rounds": flag_values.rounds, "written_before": flag_values.written}
            measured = [row for row in rows if row["ok"] and _row_key(row) == row_key]
            # Older rows do not state their conditions.
            if any(
                conditions == {k: row.get(k, v) for k, v in conditions.items()} for row in measured
            ):
                print(f"{label}, {clients} clients: {out} has it, not measured again")
                continue
            flag = [
                f"--{name}={flag_values[name].value}" for name in (*_PASSED, "server", "hidden")
            ]
            command = [sys.executable, "-m", "experiments.many_clients", *flag]
            ran = subprocess.run(
                [*command, f"--only={method}:{clients}"], capture_output=True, text=True
            )
            last = (ran.stdout.splitlines() or [""])[-1]
            row = json.loads(last) if ran.returncode == 0 else {"clients": int(clients)}
            facts = {"cohort": cohort, "store": flag_values.store, "ok": ran.returncode == 0}
            has_failed = bool(ran.returncode)
            rows[:] = [
                old for old in rows if _row_key(old) != row_key or (has_failed and old["ok"])
            ]
            rows.append({**row, **facts, **conditions})
            out.write_text(json.dumps(results, indent=2) + "\n")
            if ran.returncode:
                line = (ran.stderr.splitlines() or [""])[-1]
            elif flag_values.server:
                line = server_share.line(row)
            else:
                line = (
                    f"{row['peak'] / 2**30:.2f} GiB, {1000 * row['step']:.1f} ms per step "
                    f"({1000 * row['few_step']:.1f} with ten clients)"
                )
            print(f"{method}, {clients} clients, {flag_values.store}: {line}", flush=True)
    if not flag_values.server:
        draw(results, Path(flag_values.picture))


_PASSED = ("cohort", "rounds", "store", "written", "model")

if __name__ == "__main__":
    # Here, because other commands have flags of these names.
    flags.DEFINE_list(
        "clients", ["100", "1000", "10000", "100000", "1000000"], "Numbers of clients."
    )
    flags.DEFINE_list("methods", ["fedavg", "fedper", "local", "pfedhn"], "Methods.")
    flags.DEFINE_enum("store", "disk", STORES, "Where client-side state is stored.")
    flags.DEFINE_bool("server", False, "Measure the server's part of a round.")
    flags.DEFINE_integer(
        "hidden", 100, "Hidden units of pFedLA's hypernetworks, with --server.", lower_bound=1
    )
    flags.DEFINE_integer("cohort", COHORT, "Clients in a round.", lower_bound=1)
    flags.DEFINE_integer("rounds", 3, "Timed rounds.", lower_bound=1)
    flags.DEFINE_integer(
        "written", 0, "Clients whose state is written before the first round.", lower_bound=0
    )
    flags.DEFINE_enum("model", "lenet", sorted(MODELS), "Network.")
    for _key in _LIBRARIES:
        flags.DEFINE_string(_key, None, f"A checkout of {rivals.RIVALS[_key].repository}.")
        flags.DEFINE_string(f"{_key}_python", None, "The Python that runs it. Default: this one.")
    flags.DEFINE_float("most", 12.0, "Most GiB for another library.", lower_bound=0.1)
    flags.DEFINE_float("limit", 3600.0, "Most seconds for another library.", 1.0)
    flags.DEFINE_string("picture", "docs/many_clients.svg", "Picture of all numbers.")
    flags.DEFINE_string("only", "", "METHOD:CLIENTS to measure in this process.")
    flags.DEFINE_string("out", None, "Results file. Default: one in experiments/results.")
    run_script(main, __doc__)
