"""The code and the commands that documents show, as a reader runs them; and where links lead."""

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
SCRIPTS = ("reproduce", "studies", "leaderboard", "scaling", "many_clients", "benchmark", "agree")


def blocks(page: str, language: str = "python") -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.S | re.M)


def lines(code: str) -> int:
    """How many lines of code there are, without empty lines and lines of comment."""
    return sum(bool(re.match(r"\s*[^\s#]", line)) for line in code.splitlines())


@cache
def module(page: str, number: int = 0) -> ModuleType:
    """A block as a module that can be imported under its first function's name."""
    code = blocks(page)[number]
    name = re.findall(r"^def (\w+)", code, re.M)[0]
    made = ModuleType(name)
    exec(compile(code, f"{page}:{name}.py", "exec"), made.__dict__)
    sys.modules[name] = made
    return made


def script(name: str) -> ModuleType:
    """A Python file beside the documents, imported."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def lost(page: Path) -> list[str]:
    """The relative links of a page to what is not there, be it a file or a heading in it."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _plain(page))
    return [t for t in targets if "://" not in t and not _there(page, *t.partition("#")[::2])]


def _there(page: Path, path: str, heading: str) -> bool:
    file = page.parent / path if path else page
    if not file.exists():
        return False
    titles = re.findall(r"^#+ (.+)$", _plain(file), re.M) if heading else []
    return not heading or heading in [_anchor(title) for title in titles]


def _plain(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


_COMMAND = re.compile(
    r"(?:python -m experiments\.(\w+)|fedjax-pfl (\w+))((?:\"[^\"\n]*\"|[^`\"|\n])*)"
)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Commands that a text shows, each with its arguments; one for each turn of a shell's loop."""
    joined = re.sub(r" *\\\\?\n\s*", " ", text)
    joined = re.sub(r"(?<!`)`(?!`)[^`]+`(?!`)", lambda span: span[0].replace("\n", " "), joined)
    found = []
    for match in _COMMAND.finditer(joined):
        line = re.split(r" {2,}(?!-)| #|\)$", match[3])[0].rstrip(" .,;")
        loop = re.findall(r"^for method in (.+); do$", joined[: match.start()], re.M)
        each = loop[-1].split() if loop and "$method" in line else ["$method"]
        found += [(match[1] or match[2], shlex.split(line.replace("$method", one))) for one in each]
    return found


def refused(name: str, arguments: Sequence[str]) -> str:
    """Returns why a command cannot run as shown; capitals stand for a reader's own words."""
    if name == "cli" or name.isupper():
        return ""
    if name not in main.COMMANDS and name not in SCRIPTS:
        return f"no command {name}"
    words = [word for word in arguments if not word.startswith("--")]
    given = [word.removeprefix("--").partition("=")[::2] for word in arguments if "--" in word]
    if name == "studies" and words[:1] and words[0] in studies.SYSTEMS:
        own = importlib.import_module(f"experiments.papers.{words[0]}.studies")
        if words[1:] and words[1].islower() and words[1] not in own.STUDIES:
            return f"no study {words[1]}"
    settings = [word for word in arguments if re.match(r"--(no)?config", word)]
    for flag, value in given:
        if flag.startswith(("config", "noconfig")):
            continue
        if not _has_flag(name, words, flag):
            return f"no flag --{flag}"
        settings += [f"--config.{value}"] * (flag == "set")
    try:
        configs.check_keys(settings)
        if name == "list" and (unknown := set(words) - set(listing.KINDS)):
            return f"no kind {unknown}"
        if name == "reproduce" and (table := dict(given).get("table", "NAME")) != "NAME":
            reproduce.plans(TABLES[table], reproduce.Options(table, cells=_cells(dict(given))))
        return _preset(name, [word for word in arguments if re.match(r"--(no)?config", word)])
    except (UsageError, flags.Error, KeyError) as error:
        return str(error)


def _has_flag(name: str, words: Sequence[str], flag: str) -> bool:
    if name in main.COMMANDS:
        options, _ = command.define(main.load(name), [])
        return flag in options
    modules = [importlib.import_module(f"experiments.{name}"), configs, study]
    if name == "studies" and words[:1] and words[0] in studies.SYSTEMS:
        modules.append(importlib.import_module(f"experiments.papers.{words[0]}.studies"))
    defined = rf'"{flag}"|\}}_{flag.rpartition("_")[2]}"'  # or a library's name and this word
    return any(re.search(defined, inspect.getsource(module)) for module in modules)


def _cells(given: Mapping[str, str]) -> list[str]:
    return given["cells"].split(",") if "cells" in given else []


def _preset(name: str, arguments: Sequence[str]) -> str:
    """Reads a configuration as the command does, and checks that its settings can be together."""
    first = next((word.partition("=")[2] for word in arguments if "--config=" in word), "")
    own = name not in SYSTEMS
    if (own and not first) or first.startswith("runs/") or re.search(r"[A-Z]{3}|\.\.\.", first):
        return ""  # no configuration, one that another command writes, or a reader's own
    if arguments and first and not arguments[0].startswith("--config="):
        return "--config has to come before the settings that it brings"
    values = flags.FlagValues()
    path = str(SYSTEMS[name].__file__) if name in SYSTEMS else None
    given = [name, *configs.resolve_config(arguments, name)]
    holder = config_flags.DEFINE_config_file("config", path, flag_values=values, sys_argv=given)
    values(given)
    changes = config_flags.get_override_values(values["config"])
    words, settings = custom.register(holder.value.to_dict())
    complete = configuration.complete(settings, words)
    selection.check_used(selection.nested(changes), [complete], words)
    configuration.specify(complete, words)
    return ""
