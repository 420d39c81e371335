"""Times the library and its rivals in turns, and reports ratios, client steps and compile times.

python -m experiments.benchmark --list              lists the workloads
python -m experiments.benchmark --work=lenet-10     one workload, compared with a PyTorch loop
python -m experiments.benchmark --out=FILE.json --picture=FILE.png
                                --fl_bench=CHECKOUT --fl_bench_python=PYTHON
python -m experiments.benchmark --device=gpu --out=FILE.json --seconds=540
                                    all that needs a GPU, most important first

The PyTorch loop needs the extra `[bench]`. Other rivals run from checkouts, each in its own process
and, if it needs other packages, with its own Python. Library and rival take turns (A B A B ...).
The result is the median of the ratios within turns, because single times on a shared machine mean
little. The unit is the client step: one gradient step of one client. See docs/speed.md.
"""

import datetime
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments.flag_checks import require_folders
from experiments.libraries import (
    device_list,
    kernels,
    layouts,
    picture,
    rivals,
    roofline,
    turns,
    work,
)
from experiments.libraries.rivals import Child, Gone
from fedjax_pfl.cli.command import run_script
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import text_tables
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation.devices import prepare_devices

COMPILE = "compile"  # the workload that only compiles
LAYOUTS = {f"layouts-{network}": network for network in layouts.SIZES}  # without rivals
FEW = "lenet-10"
STEP_COMPARED_WITH_FEW = ("lenet-100", "lenet-1000", "seeds-8")
PROFILES = {f"profile-{name}": name for name in kernels.PROFILED}
_RIVALS = {"torch": rivals.TORCH, **rivals.RIVALS}
_ITEMS = (*work.WORKS, *LAYOUTS, *PROFILES, COMPILE)


def listing() -> str:
    """Returns a list of all workloads and the rivals that can run each."""
    lines = []
    for name, item in work.WORKS.items():
        lines.append(f"{name:15} {item.about}")
        if names := [rival.name for rival in _RIVALS.values() if name in rival.items]:
            lines.append(f"{'':15} rivals: {', '.join(names)}")
    for name, network in LAYOUTS.items():
        lines.append(f"{name:15} {network} with every lowering, chunk and precision")
    for name, profiled in PROFILES.items():
        lines.append(f"{name:15} device time of {profiled} by part and kernel")
    lines.append(f"{COMPILE:15} the default configurations of {', '.join(work.DEFAULTS)}, compiled")
    return "\n".join(lines)


def select_workloads(requested: Sequence[str]) -> list[str]:
    """Returns the selected workloads in order; all if none is named."""
    for name in requested:
        if name not in _ITEMS:
            raise UsageError(f"--work has {name!r}{configuration.suggestion(name, _ITEMS)}")
    return [name for name in _ITEMS if name in requested] if requested else list(_ITEMS)


def measured(
    name: str,
    item: work.Work,
    commands: Mapping[str, tuple[Sequence[str], str | None]],
    *,
    repeats: int,
    limit: float,
    few: work.Work | None = None,
) -> dict[str, Any]:
    """Returns the measurements of a workload, as the JSON file holds them.

    Args:
      name: Name of the workload, for messages.
      item: The workload.
      commands: Command and checkout of each rival.
      repeats: Number of turns.
      limit: Most seconds for an answer of a rival.
      few: The same work with few clients, to compare the time of a step with.
    """
    work.forget_peak()
    load_before, cores_before = round(os.getloadavg()[0], 1), work.busy_cores()
    workload = work.compiled(item)
    workload.run()
    reference = work.compiled(few) if few else None
    if reference:
        reference.run()
    children: dict[str, Child] = {}
    rival_facts: dict[str, Any] = {}
    missing: dict[str, str] = {}
    try:
        for rival, (start, path) in commands.items():
            spec = {**item.spec(workload.parameters), "checkout": path}
            children[rival] = Child(start, spec, limit)
            try:
                rival_facts[rival] = children[rival].wait_until_ready()
            except Gone as error:
                missing[rival] = str(error)
        timers = {rival: child.go for rival, child in children.items() if rival not in missing}
        time_few = (lambda: _clocked(reference)) if reference else None
        timed, failures = turns.take(
            lambda: _clocked(workload), timers, work.peak, repeats, time_few
        )
        peaks = {"library": work.peak_memory()}
        peaks |= {
            rival: work.peak_memory(children[rival].pid) for rival in timers.keys() - failures
        }
    finally:
        for child in children.values():
            child.close()
    for rival, reason in {**missing, **failures}.items():
        print(f"{name}: {rivals.NAMES[rival]} was not timed: {reason}", file=sys.stderr)
    steps = item.client_steps
    entries = turns.summary(timed, steps, steps * workload.flops)
    step_ratio = turns.step_ratio(timed, steps, few.client_steps) if few else None
    return {
        "about": item.about,
        "date": datetime.date.today().isoformat(),
        "repeats": repeats,
        "load_average": [load_before, round(os.getloadavg()[0], 1)],
        "cores_of_others": [cores_before, work.busy_cores()],
        "algorithm": item.algorithm,
        "clients": item.clients,
        "cohort": item.cohort,
        "seeds": item.seeds,
        "client_steps": steps,
        "batch": item.batch,
        "parameters": workload.parameters,
        "flops_per_client_step": workload.flops,
        "bytes_per_second": roofline.bandwidth(),
        "plan": workload.plan,
        "compile_seconds": round(workload.compile_seconds, 2),
        "peak_gflops": [round(turn.peak / 1e9, 1) for turn in timed],
        "who": {
            library: {**rival_facts.get(library, {}), **entry, "peak_bytes": peaks[library]}
            for library, entry in entries.items()
            if library not in failures
        },
        "missing": {**missing, **failures},
        **({"step_ratio": [round(ratio, 3) for ratio in step_ratio]} if step_ratio else {}),
    }


def _clocked(workload: work.Workload) -> float:
    start = time.perf_counter()
    workload.run()
    return time.perf_counter() - start


def provenance(note: str) -> dict[str, Any]:
    """Returns the note, the versions and the commit of a measurement."""
    return {
        "note": note,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "commit": rivals.commit(str(rivals.ADAPTERS.parent)),
    }


def read_earlier(path: str | None) -> dict[str, Any]:
    """Reads an earlier measurement of the same machine, to add to it."""
    if path is None:
        raise UsageError("--add adds to what is in --out=FILE.json; name the file")
    try:
        results = json.loads(Path(path).read_text())
        stored_machine = results["machine"]
        items, compile_seconds = results["items"], results["compile_seconds"]
        provenances = _provenance_by_item(results)
        items = {name: {**item, **provenances[name]} for name, item in items.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--add: {path} is no measurement of this command") from None
    if stored_machine != work.machine():
        raise UsageError(f"--add: {path} was measured on another machine; give another --out")
    return {
        "items": items,
        "compile_seconds": compile_seconds,
        "compile": {**results.get("compile", {}), **provenances.get(COMPILE, {})},
        **{key: results.get(key, {}) for key in ("layouts", "profiles")},
    }


def _provenance_by_item(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns note, versions and commit of each workload and of compiling."""
    defaults = {"note": "", "versions": {}, "commit": "unknown"}
    # Older files have them once for all workloads.
    defaults = {key: results.get(key, value) for key, value in defaults.items()}
    entries = dict(results["items"])
    if results["compile_seconds"]:
        entries[COMPILE] = results.get("compile", {})
    entries |= {
        f"layouts-{network}": entry for network, entry in results.get("layouts", {}).items()
    }
    entries |= {f"profile-{name}": entry for name, entry in results.get("profiles", {}).items()}
    return {
        name: {key: item.get(key, value) for key, value in defaults.items()}
        for name, item in entries.items()
    }


def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    flag_values = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; see --help")
    if flag_values.list:
        print(listing())
        return
    device_list.refuse_flags(flag_values)
    if flag_values.device == "gpu":
        device_list.run_all(flag_values.out, flag_values.seconds)
        return
    names = select_workloads(flag_values.work)
    commands, checkouts = _rival_commands(flag_values)
    require_folders(flag_values, "out", "picture")
    # A rival needs room on the same accelerator.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    prepare_devices()
    # Cached programs would make compile times meaningless.
    jax.config.update("jax_enable_compilation_cache", False)
    results: dict[str, Any] = {
        "machine": work.machine(),
        "flops": "by formula: products of convolutions and fully connected layers",
        **{key: {} for key in ("items", "compile_seconds", "compile", "layouts", "profiles")},
        **(read_earlier(flag_values.out) if flag_values.add else {}),
    }
    measured_with = provenance(flag_values.note)

    def write() -> None:
        """Writes the results so far, in case the measurement is interrupted."""
        items = results["items"]
        results["items"] = {name: items[name] for name in _ITEMS if name in items}
        optional = ("layouts", "profiles")
        parts = {key: part for key, part in results.items() if part or key not in optional}
        if flag_values.out:
            Path(flag_values.out).write_text(json.dumps(parts, indent=1) + "\n")

    write()
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        if name == COMPILE:
            cores_before = work.busy_cores()
            seconds = {key: work.compile_seconds(key) for key in work.DEFAULTS}
            cores_used = [cores_before, work.busy_cores()]
            cold, warm = (
                {key: round(pair[i], 1) for key, pair in seconds.items()} for i in range(2)
            )
            results["compile_seconds"] = cold
            results["compile"] = {**measured_with, "cores_of_others": cores_used, "kept": warm}
        elif name in LAYOUTS:
            network = LAYOUTS[name]

            def save(
                result: dict[str, Any], network: str = network, **cores_used: list[float | None]
            ) -> None:
                results["layouts"][network] = {**result, **measured_with, **cores_used}
                write()

            cores_before = work.busy_cores()
            outcome = layouts.measured(network, layouts.SIZES[network], flag_values.repeats, save)
            save(outcome, cores_of_others=[cores_before, work.busy_cores()])
        elif name in PROFILES:
            profile = kernels.profile(work.WORKS[PROFILES[name]])
            results["profiles"][PROFILES[name]] = {**profile, **measured_with}
        else:
            item = measured(
                name,
                work.WORKS[name],
                {key: command for key, command in commands.items() if name in _RIVALS[key].items},
                repeats=flag_values.repeats,
                limit=flag_values.limit,
                few=work.WORKS[FEW] if name in STEP_COMPARED_WITH_FEW else None,
            )
            for key in checkouts.keys() & item["who"].keys():
                item["who"][key]["checkout"] = checkouts[key]
            results["items"][name] = item | measured_with
        write()
    print(report(results))
    if flag_values.picture and (points := turns.curve(results["items"])):
        lenet_items = {k: item for k, item in results["items"].items() if k.startswith("lenet-")}
        caption = conditions(
            {**results, "items": lenet_items, "compile_seconds": {}, "layouts": {}}
        )
        picture.draw(points, rivals.NAMES, caption).savefig(flag_values.picture, dpi=110)


def _rival_commands(
    flag_values: Any,
) -> tuple[dict[str, tuple[Sequence[str], str | None]], dict[str, dict[str, str]]]:
    """Returns (command of the adapter, checkout) of each rival, and facts about its checkout."""
    commands: dict[str, tuple[Sequence[str], str | None]] = {}
    checkouts = {}
    if flag_values.torch:
        commands["torch"] = ([sys.executable, str(rivals.ADAPTERS / rivals.TORCH.script)], None)
    for key, rival in rivals.RIVALS.items():
        if (path := flag_values[key].value) is not None:
            checkout = rivals.checkout(key, path)
            python = rivals.python(f"{key}_python", flag_values[f"{key}_python"].value)
            commands[key] = ([python, str(rivals.ADAPTERS / rival.script)], checkout)
            checkouts[key] = {"repository": rival.repository, "commit": rivals.commit(checkout)}
    return commands, checkouts


def conditions(results: Mapping[str, Any]) -> str:
    """Returns a line on the conditions: machine, dates, turns, notes, versions and commits."""
    machine_facts = results["machine"]
    machine_name = (
        f"{machine_facts['cores']} cores {machine_facts['kind']}"
        if machine_facts["backend"] == "cpu"
        else machine_facts["device"]
    )
    dates = sorted({item["date"] for item in results["items"].values()})
    turns_of = sorted({item["repeats"] for item in results["items"].values()})
    period = f", {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""
    turn_counts = f", {' or '.join(map(str, turns_of))} turns each" if turns_of else ""
    return "; ".join(
        [f"{machine_name}{period}{turn_counts}", *_differences(_provenance_by_item(results))]
    )


def _differences(provenances: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns notes, and versions and commits if workloads differ in them."""
    facts = {
        name: {
            "note": part["note"],
            "commit": f"commit {part['commit']}",
            **{package: f"{package} {version}" for package, version in part["versions"].items()},
        }
        for name, part in provenances.items()
    }
    notes = []
    for key in dict.fromkeys(key for part in facts.values() for key in part):
        groups: dict[str, list[str]] = {}
        for name, part in facts.items():
            groups.setdefault(part.get(key, f"{key} unknown"), []).append(name)
        if len(groups) > 1:
            notes += [f"{value} ({', '.join(names)})" for value, names in groups.items() if value]
        elif key == "note":
            notes += filter(None, groups)
    return notes


def report(results: Mapping[str, Any]) -> str:
    """Returns the text to print."""
    lines = []
    if results["items"]:
        result_tables = [turns.table(results["items"], rivals.NAMES)]
        result_tables.append(turns.targets(results, rivals.NAMES))
        lines += [text_tables.text(result_tables), ""]
    if layout_results := results.get("layouts"):
        lines += [text_tables.text([layouts.table(layout_results)]), ""]
    if profiled := results.get("profiles"):
        lines += [text_tables.text([kernels.table(profiled)]), ""]
    kept_seconds = results.get("compile", {}).get("kept", {})
    compiled = {"nothing": results["compile_seconds"], "programs": kept_seconds}
    for contents, seconds in compiled.items():
        if seconds:
            text = ", ".join(f"{key} {value} s" for key, value in seconds.items())
            lines.append(f"To compile the default configurations, {contents} kept: {text}.")
    if text := turns.constant(results["items"]):
        lines.append(text)
    return "\n".join([*lines, conditions(results)])


if __name__ == "__main__":
    # Here, because other commands have flags of these names.
    flags.DEFINE_list("work", [], "Workloads. Default: all, which takes long.")
    flags.DEFINE_bool("list", False, "List the workloads.")
    flags.DEFINE_integer(
        "repeats", 9, "Number of turns of the library and each rival.", lower_bound=3
    )
    flags.DEFINE_float("limit", 600.0, "Most seconds for an answer of a rival.", 1.0)
    flags.DEFINE_enum("device", None, ["gpu"], "Measure all that needs this device.")
    flags.DEFINE_float("seconds", 540.0, "With --device: time in total.", 1.0)
    flags.DEFINE_bool("torch", True, "Run the PyTorch loop.")
    flags.DEFINE_string("out", None, "Write the measurements to this JSON file.")
    flags.DEFINE_bool("add", False, "Keep the other workloads in --out.")
    flags.DEFINE_string("picture", None, "Draw time per client step to this PNG.")
    flags.DEFINE_string("note", "", "Remark to record, such as other work on the machine.")
    for _key, _rival in rivals.RIVALS.items():
        flags.DEFINE_string(_key, None, f"A checkout of {_rival.repository}.")
        flags.DEFINE_string(f"{_key}_python", None, "Python that has its packages.")
    run_script(main, __doc__)
