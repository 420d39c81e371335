"""The same work by us and by others, in turn, as ratios; and what a step and a compilation cost.

python -m experiments.benchmark --list              the items of work
python -m experiments.benchmark --work=lenet-10     one of them, beside a plain PyTorch loop
python -m experiments.benchmark --out=FILE.json --picture=FILE.png
                                --fl_bench=CHECKOUT --fl_bench_python=PYTHON

python -m experiments.benchmark --device=gpu --out=FILE.json --seconds=540
                                    everything that needs a GPU, most important first

The loop needs the extra `[bench]` (PyTorch). Others are run from checkouts that you have, each in a
process of its own and, where it needs other packages, by a Python of its own. We and a rival take
turns (A B A B ...), and what counts is the median of the ratios of neighbours: on a shared machine
a single time says nothing. What is compared is time per client step: one gradient step of one
client. See docs/speed.md.
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
LAYOUTS = {f"layouts-{network}": network for network in layouts.SIZES}  # compare ours with ours
FEW, MANY = "lenet-10", ("lenet-100", "lenet-1000", "seeds-8")  # a client step is to take as long
PROFILES = {f"profile-{name}": name for name in ("lenet-100", "mlp", "resnet9")}
_ITEMS = (*work.WORKS, *LAYOUTS, *PROFILES, COMPILE)


def listing() -> str:
    """All items, and who can do each."""
    lines = []
    for name, item in work.WORKS.items():
        who = [
            rival.name for rival in (rivals.TORCH, *rivals.RIVALS.values()) if name in rival.items
        ]
        beside = f"\n{'':15} beside {', '.join(who)}" if who else ""
        lines.append(f"{name:15} {item.about}{beside}")
    for name, network in LAYOUTS.items():
        lines.append(f"{name:15} {network} with every lowering, chunk and precision of ours")
    for name, profiled in PROFILES.items():
        lines.append(f"{name:15} device time of {profiled} by kernel")
    lines.append(f"{COMPILE:15} the default configurations of {', '.join(work.DEFAULTS)}, compiled")
    return "\n".join(lines)


def chosen(words: Sequence[str]) -> list[str]:
    """Items by name, all where none is named."""
    for word in words:
        if word not in _ITEMS:
            raise UsageError(f"--work has {word!r}{configuration.suggestion(word, _ITEMS)}")
    return [name for name in _ITEMS if name in words] if words else list(_ITEMS)


def measured(
    name: str,
    item: work.Work,
    commands: Mapping[str, tuple[Sequence[str], str | None]],
    *,
    repeats: int,
    limit: float,
    few: work.Work | None = None,
) -> dict[str, Any]:
    """One item by us and by all who can do it.

    Args:
      few: the same work with few clients: how much longer a step takes with many is asked too.
      commands: by rival, how it is started and where its checkout is.
    """
    busy, others = round(os.getloadavg()[0], 1), [work.others()]
    mine = work.ours(item)
    mine.run()
    reference = work.ours(few) if few else None
    if reference:
        reference.run()
    children: dict[str, Child] = {}
    about: dict[str, Any] = {}
    missing: dict[str, str] = {}
    try:
        for who, (start, path) in commands.items():
            spec = {**item.spec(mine.parameters), "checkout": path}
            children[who] = Child(start, spec, limit)
            try:
                about[who] = children[who].ready()
            except Gone as error:
                missing[who] = str(error)
        there = {who: child.go for who, child in children.items() if who not in missing}
        beside = (lambda: _clocked(reference)) if reference else None
        taken, gone = turns.take(lambda: _clocked(mine), there, work.peak, repeats, beside)
    finally:
        for child in children.values():
            child.close()
    for who, why in {**missing, **gone}.items():
        print(f"{name}: {rivals.NAMES[who]} was not timed: {why}", file=sys.stderr)
    steps = item.client_steps
    found = turns.summary(taken, steps, steps * mine.flops)
    own = turns.step_ratio(taken, steps, few.client_steps) if few else None
    return {
        "about": item.about,
        "date": datetime.date.today().isoformat(),
        "repeats": repeats,
        "load_average": [busy, round(os.getloadavg()[0], 1)],
        "cores_of_others": [*others, work.others()],
        "algorithm": item.algorithm,
        "clients": item.clients,
        "cohort": item.cohort,
        "seeds": item.seeds,
        "client_steps": steps,
        "batch": item.batch,
        "parameters": mine.parameters,
        "flops_per_client_step": mine.flops,
        "plan": mine.plan,
        "compile_seconds": round(mine.compile_seconds, 2),
        "peak_gflops": [round(turn.peak / 1e9, 1) for turn in taken],
        "who": {who: {**about.get(who, {}), **own} for who, own in found.items()},
        "missing": {**missing, **gone},
        **({"step_beside_few": [round(ratio, 3) for ratio in own]} if own else {}),
    }


def _clocked(mine: work.Ours) -> float:
    began = time.perf_counter()
    mine.run()
    return time.perf_counter() - began


def machine() -> dict[str, Any]:
    """On what it was measured."""
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


def told(note: str) -> dict[str, Any]:
    """What an item is measured with, which may be other than another item's."""
    return {
        "note": note,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "commit": rivals.commit(str(rivals.HERE.parent)),
    }


def before(path: str | None) -> dict[str, Any]:
    """What an earlier measurement of the same machine has written, if it is to be added to."""
    if path is None:
        raise UsageError("--add adds to what is in --out=FILE.json; name the file")
    try:
        found = json.loads(Path(path).read_text())
        there, kept = found["machine"], {key: found[key] for key in ("items", "compile_seconds")}
        with_what = {name: dict(part) for name, part in _with_what(found).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--add: {path} is no measurement of this command") from None
    if there != machine():
        raise UsageError(f"--add: {path} was measured on another machine; give another --out")
    items = {name: {**item, **with_what[name]} for name, item in kept["items"].items()}
    compiled = {**found.get("compile", {}), **with_what.get(COMPILE, {})}
    more = {key: found.get(key, {}) for key in ("layouts", "profiles")}
    return {**kept, "items": items, "compile": compiled, **more}


def _with_what(whole: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By item and for compiling: its note, versions and commit."""
    usual = {"note": "", "versions": {}, "commit": "unknown"}  # or of the whole, as it was once
    usual = {key: whole.get(key, value) for key, value in usual.items()}
    every = dict(whole["items"])
    if whole["compile_seconds"]:
        every[COMPILE] = whole.get("compile", {})
    every |= {f"layouts-{network}": own for network, own in whole.get("layouts", {}).items()}
    every |= {f"profile-{name}": own for name, own in whole.get("profiles", {}).items()}
    return {
        name: {key: item.get(key, value) for key, value in usual.items()}
        for name, item in every.items()
    }


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    given = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; see --help")
    if given.list:
        print(listing())
        return
    if given.device == "gpu":
        device_list.run_all(given.out, given.seconds)
        return
    names, commits = chosen(given.work), {}
    commands: dict[str, tuple[Sequence[str], str | None]] = {}
    if given.torch:
        commands["torch"] = ([sys.executable, str(rivals.HERE / rivals.TORCH.script)], None)
    for key, rival in rivals.RIVALS.items():
        if (path := given[key].value) is not None:
            checkout = rivals.checked(key, path)
            runs = rivals.python(f"{key}_python", given[f"{key}_python"].value)
            commands[key] = ([runs, str(rivals.HERE / rival.script)], checkout)
            commits[key] = {"repository": rival.repository, "commit": rivals.commit(checkout)}
    for flag in ("out", "picture"):
        path = given[flag].value
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--{flag}={path} is in no folder that exists")
    # A rival needs room on the same accelerator.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    prepare_devices()
    # What was compiled for an earlier run would be no compilation.
    jax.config.update("jax_enable_compilation_cache", False)
    old = before(given.out) if given.add else {}
    items, compiled = dict(old.get("items", {})), dict(old.get("compile_seconds", {}))
    compiled_with, now = old.get("compile", {}), told(given.note)
    laid, profiles = dict(old.get("layouts", {})), dict(old.get("profiles", {}))
    about = {
        "machine": machine(),
        "flops": "by formula: products of convolutions and fully connected layers",
    }

    def write() -> dict[str, Any]:
        """Writes what was measured so far, so that a cut measurement leaves what it has."""
        ordered = {name: items[name] for name in _ITEMS if name in items}
        parts = {"items": ordered, "compile_seconds": compiled, "compile": compiled_with}
        parts |= {key: part for key, part in (("layouts", laid), ("profiles", profiles)) if part}
        if given.out:
            Path(given.out).write_text(json.dumps({**about, **parts}, indent=1) + "\n")
        return {**about, **parts}

    whole = write()
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        if name == COMPILE:
            others = [work.others()]
            compiled = {key: round(work.compile_seconds(key), 1) for key in work.DEFAULTS}
            compiled_with = {**now, "cores_of_others": [*others, work.others()]}
        elif name in LAYOUTS:
            others, network = [work.others()], LAYOUTS[name]

            def save(result: dict[str, Any], network: str = network) -> None:
                laid[network] = {**result, **now}
                write()

            own = layouts.measured(network, layouts.SIZES[network], given.repeats, save)
            laid[network] = {**own, **now, "cores_of_others": [*others, work.others()]}
        elif name in PROFILES:
            profiles[PROFILES[name]] = {**kernels.profile(work.WORKS[PROFILES[name]]), **now}
        else:
            everyone = {"torch": rivals.TORCH, **rivals.RIVALS}
            able = {key: how for key, how in commands.items() if name in everyone[key].items}
            items[name] = measured(
                name,
                work.WORKS[name],
                able,
                repeats=given.repeats,
                limit=given.limit,
                few=work.WORKS[FEW] if name in MANY else None,
            )
            items[name] |= now
            for key, where in commits.items():
                if key in items[name]["who"]:
                    items[name]["who"][key]["checkout"] = where
        whole = write()
    print(report(whole))
    if given.picture and (points := turns.curve(items)):
        drawn = {name: item for name, item in items.items() if name.startswith("lenet-")}
        under = conditions({**whole, "items": drawn, "compile_seconds": {}, "layouts": {}})
        picture.draw(points, rivals.NAMES, under).savefig(given.picture, dpi=110)


def conditions(whole: Mapping[str, Any]) -> str:
    """A line: machine, repeats, and what else is to be known; of what where it is not of all."""
    on = whole["machine"]
    what = f"{on['cores']} cores {on['kind']}" if on["backend"] == "cpu" else on["device"]
    dates = sorted({item["date"] for item in whole["items"].values()})
    turns_of = sorted({item["repeats"] for item in whole["items"].values()})
    when = f", {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""
    many = f", {' or '.join(map(str, turns_of))} turns each" if turns_of else ""
    return "; ".join([f"{what}{when}{many}", *_differences(_with_what(whole))])


def _differences(with_what: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Notes; versions and commits where items were measured with several."""
    each = {
        name: {
            "note": part["note"],
            "commit": f"commit {part['commit']}",
            **{package: f"{package} {version}" for package, version in part["versions"].items()},
        }
        for name, part in with_what.items()
    }
    said = []
    for key in dict.fromkeys(key for part in each.values() for key in part):
        groups: dict[str, list[str]] = {}
        for name, part in each.items():
            groups.setdefault(part.get(key, f"{key} unknown"), []).append(name)
        if len(groups) > 1:
            said += [f"{value} ({', '.join(names)})" for value, names in groups.items() if value]
        elif key == "note":
            said += filter(None, groups)
    return said


def report(whole: Mapping[str, Any]) -> str:
    """What is printed."""
    lines = []
    if whole["items"]:
        lines += [text_tables.text([turns.table(whole["items"], rivals.NAMES)]), ""]
    if laid := whole.get("layouts"):
        lines += [text_tables.text([layouts.table(laid)]), ""]
    if profiled := whole.get("profiles"):
        lines += [text_tables.text([kernels.table(profiled)]), ""]
    if whole["compile_seconds"]:
        said = ", ".join(f"{key} {value} s" for key, value in whole["compile_seconds"].items())
        lines.append(f"To compile the default configurations, nothing kept: {said}.")
    if said := turns.constant(whole["items"]):
        lines.append(said)
    return "\n".join([*lines, conditions(whole)])


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
