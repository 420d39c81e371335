"""Times the library and its rivals in turn, and reports ratios, client steps and compile times.

python -m experiments.benchmark --list              the items of work
python -m experiments.benchmark --work=lenet-10     one of them, beside a plain PyTorch loop
python -m experiments.benchmark --out=FILE.json --picture=FILE.png
                                --fl_bench=CHECKOUT --fl_bench_python=PYTHON

python -m experiments.benchmark --device=gpu --out=FILE.json --seconds=540
                                    everything that needs a GPU, most important first

The PyTorch loop needs the extra `[bench]`. Other rivals run from checkouts, each in its own process
and, if it needs other packages, with its own Python. Library and rival take turns (A B A B ...).
The result is the median of the ratios within turns, because single times on a shared machine mean
little. The unit is the client step: one gradient step of one client. See docs/speed.md.
"""

import contextlib
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments.libraries import device_list, kernels, layouts, picture, rivals, turns, work
from experiments.libraries.rivals import Child, Gone
from fedjax_pfl.cli.command import run_script
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import text_tables
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation.devices import cores, prepare_devices

COMPILE = "compile"  # the item that only compiles
LAYOUTS = {f"layouts-{network}": network for network in layouts.SIZES}  # without rivals
FEW = "lenet-10"
STEP_COMPARED_WITH_FEW = ("lenet-100", "lenet-1000", "seeds-8")
PROFILES = {f"profile-{name}": name for name in ("lenet-100", "mlp", "resnet9")}
_ITEMS = (*work.WORKS, *LAYOUTS, *PROFILES, COMPILE)


def listing() -> str:
    """Returns a list of all workloads and the rivals that can run each."""
    lines = []
    for name, item in work.WORKS.items():
        names = [
            rival.name for rival in (rivals.TORCH, *rivals.RIVALS.values()) if name in rival.items
        ]
        rivals_line = f"\n{'':15} rivals_line {', '.join(names)}" if names else ""
        lines.append(f"{name:15} {item.about}{rivals_line}")
    for name, network in LAYOUTS.items():
        lines.append(f"{name:15} {network} with every lowering, chunk and precision of ours")
    for name, profiled in PROFILES.items():
        lines.append(f"{name:15} device time of {profiled} by kernel")
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
    """One item by us and by all rival can do it.

    Args:
      few: the same work with few clients: how much longer a step takes with many is asked too.
      commands: by rival, how it is started and where its checkout is.
    """
    busy, cores_before = round(os.getloadavg()[0], 1), [work.others()]
    ours = work.ours(item)
    ours.run()
    reference = work.ours(few) if few else None
    if reference:
        reference.run()
    children: dict[str, Child] = {}
    rival_facts: dict[str, Any] = {}
    missing: dict[str, str] = {}
    try:
        for rival, (start, path) in commands.items():
            spec = {**item.spec(ours.parameters), "checkout": path}
            children[rival] = Child(start, spec, limit)
            try:
                rival_facts[rival] = children[rival].ready()
            except Gone as error:
                missing[rival] = str(error)
        timers = {rival: child.go for rival, child in children.items() if rival not in missing}
        time_few = (lambda: _clocked(reference)) if reference else None
        timed, failures = turns.take(lambda: _clocked(ours), timers, work.peak, repeats, time_few)
    finally:
        for child in children.values():
            child.close()
    for rival, reason in {**missing, **failures}.items():
        print(f"{name}: {rivals.NAMES[rival]} was not timed: {reason}", file=sys.stderr)
    steps = item.client_steps
    entries = turns.summary(timed, steps, steps * ours.flops)
    step_ratio = turns.step_ratio(timed, steps, few.client_steps) if few else None
    return {
        "about": item.about,
        "date": datetime.date.today().isoformat(),
        "repeats": repeats,
        "load_average": [busy, round(os.getloadavg()[0], 1)],
        "cores_of_others": [*cores_before, work.others()],
        "algorithm": item.algorithm,
        "clients": item.clients,
        "cohort": item.cohort,
        "seeds": item.seeds,
        "client_steps": steps,
        "batch": item.batch,
        "parameters": ours.parameters,
        "flops_per_client_step": ours.flops,
        "plan": ours.plan,
        "compile_seconds": round(ours.compile_seconds, 2),
        "peak_gflops": [round(turn.peak / 1e9, 1) for turn in timed],
        "who": {
            rival: {**rival_facts.get(rival, {}), **step_ratio}
            for rival, step_ratio in entries.items()
        },
        "missing": {**missing, **failures},
        **({"step_beside_few": [round(ratio, 3) for ratio in step_ratio]} if step_ratio else {}),
    }


def _clocked(ours: work.Ours) -> float:
    start = time.perf_counter()
    ours.run()
    return time.perf_counter() - start


def machine() -> dict[str, Any]:
    """Returns facts about the machine."""
    return {
        "cores": cores(),
        "kind": _processor(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


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
        stored_machine, kept_parts = (
            results["machine"],
            {key: results[key] for key in ("items", "compile_seconds")},
        )
        provenances = {name: dict(part) for name, part in _provenance_by_item(results).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--add: {path} is no measurement of this command") from None
    if stored_machine != machine():
        raise UsageError(f"--add: {path} was measured on another machine; give another --out")
    items = {name: {**item, **provenances[name]} for name, item in kept_parts["items"].items()}
    compiled = {**results.get("compile", {}), **provenances.get(COMPILE, {})}
    other_parts = {key: results.get(key, {}) for key in ("layouts", "profiles")}
    return {**kept_parts, "items": items, "compile": compiled, **other_parts}


def _provenance_by_item(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns note, versions and commit of each workload and of compiling."""
    defaults = {
        "note": "",
        "versions": {},
        "commit": "unknown",
    }  # older files have them for the results file
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
    given = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; see --help")
    if given.list:
        print(listing())
        return
    if given.device == "gpu":
        device_list.run_all(given.out, given.seconds)
        return
    names, commits = select_workloads(given.work), {}
    commands: dict[str, tuple[Sequence[str], str | None]] = {}
    if given.torch:
        commands["torch"] = ([sys.executable, str(rivals.ADAPTERS / rivals.TORCH.script)], None)
    for key, rival in rivals.RIVALS.items():
        if (path := given[key].value) is not None:
            checkout = rivals.checked(key, path)
            runs = rivals.python(f"{key}_python", given[f"{key}_python"].value)
            commands[key] = ([runs, str(rivals.ADAPTERS / rival.script)], checkout)
            commits[key] = {"repository": rival.repository, "commit": rivals.commit(checkout)}
    for flag in ("out", "picture"):
        path = given[flag].value
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--{flag}={path} is in no folder that exists")
    # A rival needs room on the same accelerator.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    prepare_devices()
    # Cached programs would make compile times meaningless.
    jax.config.update("jax_enable_compilation_cache", False)
    earlier = read_earlier(given.out) if given.add else {}
    items, compiled = dict(earlier.get("items", {})), dict(earlier.get("compile_seconds", {}))
    compiled_with, measured_with = earlier.get("compile", {}), provenance(given.note)
    layout_results, profiles = dict(earlier.get("layouts", {})), dict(earlier.get("profiles", {}))
    about = {
        "machine": machine(),
        "flops": "by formula: products of convolutions and fully connected layers",
    }

    def write() -> dict[str, Any]:
        """Writes the results so far, so that an interrupted measurement keeps them."""
        ordered = {name: items[name] for name in _ITEMS if name in items}
        parts = {"items": ordered, "compile_seconds": compiled, "compile": compiled_with}
        parts |= {
            key: part for key, part in (("layouts", layout_results), ("profiles", profiles)) if part
        }
        if given.out:
            Path(given.out).write_text(json.dumps({**about, **parts}, indent=1) + "\n")
        return {**about, **parts}

    results = write()
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        if name == COMPILE:
            cores_before = [work.others()]
            compiled = {key: round(work.compile_seconds(key), 1) for key in work.DEFAULTS}
            compiled_with = {**measured_with, "cores_of_others": [*cores_before, work.others()]}
        elif name in LAYOUTS:
            cores_before, network = [work.others()], LAYOUTS[name]

            def save(result: dict[str, Any], network: str = network) -> None:
                layout_results[network] = {**result, **measured_with}
                write()

            outcome = layouts.measured(network, layouts.SIZES[network], given.repeats, save)
            layout_results[network] = {
                **outcome,
                **measured_with,
                "cores_of_others": [*cores_before, work.others()],
            }
        elif name in PROFILES:
            profiles[PROFILES[name]] = {
                **kernels.profile(work.WORKS[PROFILES[name]]),
                **measured_with,
            }
        else:
            all_rivals = {"torch": rivals.TORCH, **rivals.RIVALS}
            runnable = {
                key: command for key, command in commands.items() if name in all_rivals[key].items
            }
            items[name] = measured(
                name,
                work.WORKS[name],
                runnable,
                repeats=given.repeats,
                limit=given.limit,
                few=work.WORKS[FEW] if name in STEP_COMPARED_WITH_FEW else None,
            )
            items[name] |= measured_with
            for key, checkout_facts in commits.items():
                if key in items[name]["who"]:
                    items[name]["who"][key]["checkout"] = checkout_facts
        results = write()
    print(report(results))
    if given.picture and (points := turns.curve(items)):
        lenet_items = {name: item for name, item in items.items() if name.startswith("lenet-")}
        caption = conditions(
            {**results, "items": lenet_items, "compile_seconds": {}, "layouts": {}}
        )
        picture.draw(points, rivals.NAMES, caption).savefig(given.picture, dpi=110)


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
        lines += [text_tables.text([turns.table(results["items"], rivals.NAMES)]), ""]
    if layout_results := results.get("layouts"):
        lines += [text_tables.text([layouts.table(layout_results)]), ""]
    if profiled := results.get("profiles"):
        lines += [text_tables.text([kernels.table(profiled)]), ""]
    if results["compile_seconds"]:
        text = ", ".join(f"{key} {value} s" for key, value in results["compile_seconds"].items())
        lines.append(f"To compile the default configurations, nothing kept: {text}.")
    if text := turns.constant(results["items"]):
        lines.append(text)
    return "\n".join([*lines, conditions(results)])


if __name__ == "__main__":
    # Here, because other commands have flags of these names.
    flags.DEFINE_list("work", [], "Items of work. Default: all, which takes long.")
    flags.DEFINE_bool("list", False, "Show the items and end.")
    flags.DEFINE_integer("repeats", 9, "How often we and each rival take turns.", lower_bound=3)
    flags.DEFINE_float("limit", 600.0, "Seconds that an answer of a rival may take.", 1.0)
    flags.DEFINE_enum("device", None, ["gpu"], "Measure the whole list for this kind of device.")
    flags.DEFINE_float("seconds", 540.0, "With --device: when to stop starting items.", 1.0)
    flags.DEFINE_bool("torch", True, "Run the PyTorch loop.")
    flags.DEFINE_string("out", None, "Write the measurements to this JSON file.")
    flags.DEFINE_bool("add", False, "Keep the other items that --out has.")
    flags.DEFINE_string("picture", None, "Draw time per client step to this PNG.")
    flags.DEFINE_string("note", "", "What else is to be known, such as other work on the machine.")
    for _key, _rival in rivals.RIVALS.items():
        flags.DEFINE_string(_key, None, f"A checkout of {_rival.repository}.")
        flags.DEFINE_string(f"{_key}_python", None, "The Python that has what it needs.")
    run_script(main, __doc__)
