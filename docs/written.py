"""Generates the parts of pages that come from the code: python docs/written.py

A page holds <!-- begin MARK WORD ... -->, the generated text, and <!-- end -->. The marks are
docstring MODULE, settings METHOD ..., presets SYSTEM PRESET ..., listing KIND, options KIND,
tables, speed FILE, libraries FILE, accuracies FILE, leaderboard COLUMN, stress, summary and
cells TABLE COLUMN,... ROW ....
A name that does not exist in the code is an error. A test checks that pages are up to date.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

from experiments import agree, benchmark
from experiments.libraries import kernels, layouts, rivals, scored, turns
from experiments.papers import agreement
from experiments.papers.tables import TABLES
from fedjax_pfl.report import leaderboard as board
from fedjax_pfl.report import text_tables
from fedjax_pfl.settings import configuration, listing

HERE = Path(__file__).parent
RESULTS = HERE.parent / "experiments" / "results"
TRAINING = (
    "partition",
    "model",
    "clients",
    "clients_per_round",
    "rounds",
    "local_epochs",
    "local_steps",
    "batch_size",
    "drop_last",
    "learning_rate",
    "momentum",
    "weight_decay",
    "clip_norm",
    "split",
    "test_fraction",
    "validation_fraction",
    "validation_examples",
    "augment",
    "keep_optimizer",
    "keep_head",
)


def written(page: str) -> str:
    """A page's text with what belongs between its marks."""

    def made(match: re.Match[str]) -> str:
        begin, (mark, *words), end = match[1], match[2].split(), match[3]
        return f"{begin}\n\n{MARKS[mark](*words).strip()}\n\n{end}"

    return re.sub(r"^(<!-- begin (.+?) -->)$.*?^(<!-- end -->)$", made, page, flags=re.M | re.S)


def docstring(name: str) -> str:
    """The docstring of a module, as it is."""
    return f"```text\n{inspect.getdoc(importlib.import_module(name))}\n```"


def settings(*names: str) -> str:
    """Settings of methods, their defaults, and what they mean."""
    defaults, rows = configuration.default(), []
    for name in names:
        factory = configuration.ALGORITHMS[name]
        meanings = configuration.meanings(factory)
        for key in configuration.factory_settings(factory):
            usual = "unset" if defaults[name][key] is None else defaults[name][key]
            rows.append([f"`{name}.{key}`", f"`{usual}`", meanings[key]])
    return text_tables.markdown([text_tables.Table("", ["default", "meaning"], rows)]).replace(
        "---:", "---"
    )


def presets(system: str, *names: str) -> str:
    """How presets train, and what they change of their method's defaults, side by side."""
    made = importlib.import_module(f"fedjax_pfl.presets.{system}").get_config
    defaults, shown = configuration.default(), []
    for config in map(made, names):
        rounds = sum(phase.rounds for phase in configuration.phases(config))
        row = {key: config[key] for key in TRAINING} | {"rounds": rounds}
        if config.split == "official":
            row["test_fraction"] = None  # the source has test examples
        method, own = config.algorithm, config.get(config.algorithm, {})
        row |= {f"{method}.{k}": own[k] for k in own if own[k] != defaults[method][k]}
        shown.append({key: value for key, value in row.items() if value})
    own_keys = sorted({key for row in shown for key in row} - set(TRAINING))
    keys = [k for k in (*TRAINING, *own_keys) if any(k in row for row in shown)]
    rows = [[f"`{k}`", *(f"`{row[k]}`" if k in row else "-" for row in shown)] for k in keys]
    return text_tables.markdown([text_tables.Table("", list(names), rows)])


def kind(name: str) -> str:
    """What there is of a kind, as the command lists it."""
    return f"```text\n{listing.listing(name)}\n```"


def options(name: str) -> str:
    """Returns the settings of a kind, such as datasets. Equal settings share a row."""
    _, factories = listing.TABLES[name]
    defaults, owners = configuration.default(), dict[tuple[str, str, str], list[str]]()
    for owner, factory in factories.items():
        meanings = configuration.meanings(factory)
        for key in configuration.factory_settings(factory):
            value = defaults[owner][key]
            shown = "unset" if value is None else str(value) or '""'
            owners.setdefault((key, shown, meanings[key]), []).append(owner)
    rows = [
        [f"`{key}`", ", ".join(names), f"`{shown}`", meaning]
        for (key, shown, meaning), names in owners.items()
    ]
    return text_tables.markdown(
        [text_tables.Table("", ["of", "default", "meaning"], rows)]
    ).replace("---:", "---")


def tables() -> str:
    """Which tables of which papers there are."""
    rows = [
        [f"`{name}`", table.about.rpartition(": ")[2], ", ".join(table.columns)]
        for name, table in TABLES.items()
    ]
    return text_tables.markdown([text_tables.Table("", ["contents", "columns"], rows)]).replace(
        "---:", "---"
    )


def speed(name: str) -> str:
    """Returns the tables of a measurement by `experiments.benchmark`, and its conditions."""
    whole = json.loads((RESULTS / name).read_text())
    shown = [turns.table(whole["items"], rivals.NAMES)]
    targets = turns.targets(whole, rivals.NAMES)
    known = [row for row in targets.rows if row[-1] != "not measured"]
    shown += [targets._replace(rows=known)] if known else []
    shown += [layouts.table(part) for part in [whole.get("layouts")] if part]
    shown += [kernels.table(part, 8) for part in [whole.get("profiles")] if part]
    return f"{text_tables.markdown(shown)}\n\nMeasured on {benchmark.conditions(whole)}."


def libraries(name: str) -> str:
    """Which methods of other libraries are ours, and why others are not: `experiments.agree`."""
    whole = json.loads((RESULTS / name).read_text())
    commits = ", ".join(f"{rivals.NAMES[key]} {commit}" for key, commit in whole["commits"].items())
    body = text_tables.markdown([agree.table(whole["methods"])]).replace("---:", "---")
    why = "\n".join(f"- {line}" for line in agree.reasons(whole["methods"]))
    return f"{body}\n\nCompared with {commits}. Reasons for the differences:\n\n{why}"


def accuracies(name: str) -> str:
    """Ours and theirs after many rounds: `experiments.agree --rounds`."""
    whole = json.loads((RESULTS / name).read_text())
    body = text_tables.markdown([scored.table(whole)]).replace("---:", "---")
    why = "\n".join(f"- {line}" for line in scored.reasons(whole))
    commits = ", ".join(f"{rivals.NAMES[key]} {commit}" for key, commit in whole["commits"].items())
    length = f"After {whole['rounds']} rounds, over {whole['seeds']} seeds"
    said = f"{length}, with {commits}."
    return f"{body}\n\n{said}" + (f" Reasons for the asterisks:\n\n{why}" if why else "")


def leaderboard(name: str) -> str:
    """A split of `experiments.leaderboard`: its table."""
    column = json.loads((RESULTS / "leaderboard.json").read_text())["columns"][name]
    body = text_tables.markdown([board.table(name, column)])
    return f"{body}\n\nMade with commit {', '.join(board.commits({'columns': {name: column}}))}."


def stress() -> str:
    """Returns the table of faults and of the runs that survived them."""
    whole = json.loads((HERE.parent / "tests" / "stress" / "measured.json").read_text())
    rows = [
        [kind, str(tried), str(survived), str(lost), part["date"], note]
        for part in whole.values()
        for kind, tried, survived, lost, note in part["rows"]
    ]
    heads = ["tried", "survived", "lost", "measured", "note"]
    return text_tables.markdown([text_tables.Table("", heads, rows)])


def summary() -> str:
    """Returns how many published numbers were run and how many agree."""
    return agreement.summary(RESULTS, TABLES, "markdown")


def cells(name: str, columns: str, *rows: str) -> str:
    """Returns published cells that were run, with our numbers.

    Args:
      name: The table.
      columns: Its columns, joined with commas.
      *rows: Its rows. Default: all; a line then names those that were not run.
    """
    chosen = columns.split(",")
    body = text_tables.markdown(agreement.beside(RESULTS, TABLES, name, chosen, rows))
    missing = [] if rows else agreement.not_run(RESULTS, TABLES, name, chosen)
    return f"{body}\n\nNot run: {', '.join(missing)}." if missing else body


MARKS: dict[str, Callable[..., str]] = {
    "docstring": docstring,
    "settings": settings,
    "presets": presets,
    "listing": kind,
    "options": options,
    "tables": tables,
    "speed": speed,
    "libraries": libraries,
    "accuracies": accuracies,
    "leaderboard": leaderboard,
    "stress": stress,
    "summary": summary,
    "cells": cells,
}


if __name__ == "__main__":
    for path in [*sorted(HERE.glob("*.md")), *sorted(RESULTS.glob("*.md"))]:
        text = path.read_text()
        if (new := written(text)) != text:
            path.write_text(new)
            print(path.name)
