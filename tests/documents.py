"""Reads the code, commands and links of the documents, and checks that commands are valid."""

import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from absl import flags
from ml_collections import config_flags

from experiments import reproduce, studies
from experiments.papers import study
from experiments.papers.tables import TABLES
from fedjax_pfl.cli import command, configs, main
from fedjax_pfl.cli import list as listing
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.presets import SYSTEMS
from fedjax_pfl.settings import configuration, custom, selection

DOCS = Path(__file__).parents[1] / "docs"
# Commands that only the repository has.
SCRIPTS = (
    "reproduce",
    "studies",
    "leaderboard",
    "scaling",
    "many_clients",
    "benchmark",
    "agree",
    "correlated_noise",
    "attackers",
)


def blocks(page: str, language: str = "python") -> list[str]:
    """Returns the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.S | re.M)


def lines(code: str) -> int:
    """Counts lines of code, without empty lines and comments."""
    return sum(bool(re.match(r"\s*[^\s#]", line)) for line in code.splitlines())


@cache
def module(page: str, number: int = 0) -> ModuleType:
    """Runs a code block as a module, which can be imported by the name of its first function."""
    code = blocks(page)[number]
    name = re.findall(r"^def (\w+)", code, re.M)[0]
    module = ModuleType(name)
    exec(compile(code, f"{page}:{name}.py", "exec"), module.__dict__)
    sys.modules[name] = module
    return module


def import_script(name: str) -> ModuleType:
    """Imports a Python file of docs/."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def broken_links(page: Path) -> list[str]:
    """Returns the relative links of a page whose file or heading does not exist."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _without_code(page))
    return [
        t for t in targets if "://" not in t and not _target_exists(page, *t.partition("#")[::2])
    ]


def _target_exists(page: Path, path: str, heading: str) -> bool:
    file = page.parent / path if path else page
    if not file.exists():
        return False
    titles = re.findall(r"^#+ (.+)$", _without_code(file), re.M) if heading else []
    return not heading or heading in [_anchor(title) for title in titles]


def _without_code(page: Path) -> str:
    """Returns the text of a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


_COMMAND = re.compile(
    r"(?:python -m experiments\.(\w+)|fedjax-pfl (\w[\w-]*))((?:\"[^\"\n]*\"|[^`\"|\n])*)"
)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Returns the commands in a text with their arguments. A shell loop gives one per method."""
    joined = re.sub(r" *\\\\?\n\s*", " ", text)
    joined = re.sub(r"(?<!`)`(?!`)[^`]+`(?!`)", lambda span: span[0].replace("\n", " "), joined)
    result = []
    for match in _COMMAND.finditer(joined):
        line = re.split(r" {2,}(?!-)| #|\)$", match[3])[0].rstrip(" .,;")
        loop = re.findall(r"^for method in (.+); do$", joined[: match.start()], re.M)
        methods = loop[-1].split() if loop and "$method" in line else ["$method"]
        result += [
            (match[1] or match[2], shlex.split(line.replace("$method", method)))
            for method in methods
        ]
    return result


def reason_to_refuse(name: str, arguments: Sequence[str]) -> str:
    """Returns why a command is invalid, or "". Names in capitals are placeholders."""
    if name == "cli" or name.isupper():
        return ""
    if name not in main.COMMANDS and name not in SCRIPTS:
        return f"no command {name}"
    positional = [word for word in arguments if not word.startswith("--")]
    flag_values = [
        word.removeprefix("--").partition("=")[::2] for word in arguments if "--" in word
    ]
    if name == "studies" and positional[:1] and positional[0] in studies.SYSTEMS:
        study_module = importlib.import_module(f"experiments.papers.{positional[0]}.studies")
        if positional[1:] and positional[1].islower() and positional[1] not in study_module.STUDIES:
            return f"no study {positional[1]}"
    settings = [word for word in arguments if re.match(r"--(no)?config", word)]
    for flag, value in flag_values:
        if flag.startswith(("config", "noconfig")):
            continue
        if not _has_flag(name, positional, flag):
            return f"no flag --{flag}"
        settings += [f"--config.{value}"] * (flag == "set")
    try:
        configs.check_keys(settings)
        if name == "list" and (unknown := set(positional) - set(listing.KINDS)):
            return f"no kind {unknown}"
        if name == "reproduce" and (table := dict(flag_values).get("table", "NAME")) != "NAME":
            reproduce.plans(
                TABLES[table], reproduce.Options(table, cells=_cells(dict(flag_values)))
            )
        return _preset(name, [word for word in arguments if re.match(r"--(no)?config", word)])
    except (UsageError, flags.Error, KeyError) as error:
        return str(error)


def _has_flag(name: str, positional: Sequence[str], flag: str) -> bool:
    if name in main.COMMANDS:
        options, _ = command.define(main.load(name), [])
        return flag in options
    modules = [importlib.import_module(f"experiments.{name}"), configs, study]
    if name == "studies" and positional[:1] and positional[0] in studies.SYSTEMS:
        modules.append(importlib.import_module(f"experiments.papers.{positional[0]}.studies"))
    defined = rf'"{flag}"|\}}_{flag.rpartition("_")[2]}"'  # or f"{library}_..."
    return any(re.search(defined, inspect.getsource(module)) for module in modules)


def _cells(flag_values: Mapping[str, str]) -> list[str]:
    return flag_values["cells"].split(",") if "cells" in flag_values else []


def _preset(name: str, arguments: Sequence[str]) -> str:
    """Reads a configuration as the command does, and raises if its settings are invalid."""
    first = next((word.partition("=")[2] for word in arguments if "--config=" in word), "")
    user_defined = name not in SYSTEMS
    if (
        (user_defined and not first)
        or first.startswith("runs/")
        or re.search(r"[A-Z]{3}|\.\.\.", first)
        or configs.own_settings(arguments)
    ):
        return ""  # no configuration, a placeholder, or a file that the reader or a command writes
    if arguments and first and not arguments[0].startswith("--config="):
        return "--config has to come before the settings that it brings"
    values = flags.FlagValues()
    path = str(SYSTEMS[name].__file__) if name in SYSTEMS else None
    argv = [name, *configs.resolve_config(arguments, name)]
    holder = config_flags.DEFINE_config_file("config", path, flag_values=values, sys_argv=argv)
    values(argv)
    changes = config_flags.get_override_values(values["config"])
    registry, settings = custom.register(holder.value.to_dict())
    complete = configuration.complete(settings, registry)
    selection.check_used(selection.nested(changes), [complete], registry)
    configuration.specify(complete, registry)
    return ""
