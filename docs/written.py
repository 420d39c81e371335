"""Generates the parts of pages that come from the code: python docs/written.py

A page holds <!-- begin MARK ARGUMENT ... -->, the generated text, and <!-- end -->. The marks are

    docstring MODULE, settings METHOD ..., presets SYSTEM PRESET ..., listing KIND, tables;
    speed FILE, goals FILE ..., profile FILE FILE, rounds FILE RIVAL, libraries FILE;
    accuracies FILE, memory FILE, server FILE, agreed FILE, leaderboard COLUMN, stress;
    privacy, released, correlated;
    summary, cells TABLE COLUMN,... ROW ..., lengths TABLE COLUMN ROUNDS ..., gaps PAPER.

A name that does not exist in the code is an error. A test checks that pages are up to date.
"""

import importlib
import inspect
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import agree, correlated_noise
from experiments.libraries import measurement_tables, rivals, scored, server_share
from experiments.libraries.measurement_tables import RESULTS, load, text_table
from experiments.papers import agreement, gaps
from experiments.papers.tables import TABLES
from fedjax_pfl.algorithms import METHODS, Method
from fedjax_pfl.core.algorithm import Algorithm
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.example_noise import ExampleNoise
from fedjax_pfl.networks import MLP
from fedjax_pfl.report import leaderboard as board
from fedjax_pfl.report import text_tables
from fedjax_pfl.settings import configuration, listing
from fedjax_pfl.testing import example
from fedjax_pfl.transforms.privacy import client_level, example_level, local_level
from fedjax_pfl.transforms.wrapping import round_shapes

DOCS = Path(__file__).parent
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


def update(page: str) -> str:
    """Returns the text of a page with its generated parts rewritten."""

    def generate(match: re.Match[str]) -> str:
        begin, (mark, *arguments), end = match[1], match[2].split(), match[3]
        return f"{begin}\n\n{MARKS[mark](*arguments).strip()}\n\n{end}"

    return re.sub(r"^(<!-- begin (.+?) -->)$.*?^(<!-- end -->)$", generate, page, flags=re.M | re.S)


def _commits(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{rivals.NAMES[key]} {commit}" for key, commit in record["commits"].items())


def docstring(name: str) -> str:
    """Returns the docstring of a module."""
    return f"```text\n{inspect.getdoc(importlib.import_module(name))}\n```"


def _display(value: Any) -> str:
    return "unset" if value is None else str(value) or '""'


def settings(*names: str) -> str:
    """Returns the settings of methods with their defaults and meanings."""
    defaults, rows = configuration.default(), []
    for name in names:
        factory = configuration.ALGORITHMS[name]
        meanings = configuration.meanings(factory)
        for key in configuration.factory_settings(factory):
            rows.append([f"`{name}.{key}`", f"`{_display(defaults[name][key])}`", meanings[key]])
    return text_table(["default", "meaning"], rows)


def presets(system: str, *names: str) -> str:
    """Returns the training settings of presets and their changes of the method's defaults."""
    get_config = importlib.import_module(f"fedjax_pfl.presets.{system}").get_config
    defaults, columns = configuration.default(), []
    for config in map(get_config, names):
        rounds = sum(phase.rounds for phase in configuration.phases(config))
        column = {key: config[key] for key in TRAINING} | {"rounds": rounds}
        if config.split == "official":
            column["test_fraction"] = None  # the source has test examples
        method, values = config.algorithm, config.get(config.algorithm, {})
        column |= {f"{method}.{k}": values[k] for k in values if values[k] != defaults[method][k]}
        columns.append({k: value for k, value in column.items() if value or k not in TRAINING})
    method_keys = sorted({key for column in columns for key in column} - set(TRAINING))
    keys = [k for k in (*TRAINING, *method_keys) if any(k in column for column in columns)]
    rows = [[f"`{k}`", *(f"`{c[k]}`" if k in c else "-" for c in columns)] for k in keys]
    return text_tables.markdown([text_tables.Table("", list(names), rows)])


def list_kind(name: str) -> str:
    """Returns the output of `fedjax-pfl list` for a kind."""
    return f"```text\n{listing.listing(name)}\n```"


def _tiny_methods() -> Iterator[tuple[Method, Algorithm]]:
    """Yields every method, and its algorithm on a tiny network."""
    _, federation = example.vectors()
    for method in METHODS.values():
        yield method, method.factory(example.TinyNetwork(), example.training(), federation)


def _example_level_reason(method: Method) -> str:
    """Returns why example-level privacy is not possible on a network without BatchNorm, or ""."""
    data, federation = example.vectors()
    training = example.training()._replace(example_noise=ExampleNoise(1.0, 1.0))
    network = MLP(outputs=federation.outputs, hidden=(4,))
    try:
        algorithm = method.factory(network, training, federation)
        return example_level.unsupported_reason(algorithm, data, training)
    except UsageError:
        return "batch statistics or values that are collected over steps"


def privacy() -> str:
    """Returns which methods each level of privacy admits, and why not, as the code decides."""
    data, _ = example.vectors()
    methods: dict[tuple[str, ...], list[str]] = {}
    for method, algorithm in _tiny_methods():
        reasons = [
            client_level.unsupported_reason(algorithm, data),
            _example_level_reason(method),
            local_level.unsupported_reason(algorithm, data),
        ]
        methods.setdefault(tuple(reasons), []).append(method.row)
    letters = {reason: chr(97 + i) for i, reason in enumerate(sorted({*sum(methods, ())} - {""}))}
    rows = [
        [", ".join(methods[key]), *(f"no ({letters[r]})" if r else "yes" for r in key)]
        for key in sorted(methods)
    ]
    legend = "; ".join(f"({letter}) {reason}" for reason, letter in letters.items())
    return f"{text_table(['`client`', '`example`', '`local`'], rows)}\n\n{legend}."


def released() -> str:
    """Returns what methods upload besides a model, and what the server keeps for each client."""
    rows = []
    data, _ = example.vectors()
    for method, algorithm in _tiny_methods():
        shapes = round_shapes(algorithm, data)
        upload, stored = shapes.upload, shapes.state.rows
        uploads = sorted(set(upload) - {"params", "batch_stats"}) if upload else []
        names: Sequence[str] = ()
        if jax.tree.leaves(stored):
            names = getattr(stored, "_fields", list(stored) if isinstance(stored, dict) else ["id"])
        if uploads or names:
            cells = (", ".join(f"`{name}`" for name in part) or "–" for part in (uploads, names))
            rows.append([method.row, *cells])
    return text_table(["uploaded besides a model", "kept by the server for each client"], rows)


def tables() -> str:
    """Returns the tables of the papers with their columns."""
    rows = [
        [f"`{name}`", table.about.rpartition(": ")[2], ", ".join(table.columns)]
        for name, table in TABLES.items()
    ]
    return text_table(["contents", "columns"], rows)


def _with_reasons(table: text_tables.Table, note: str, reasons: Sequence[str]) -> str:
    """Returns a table, a note on it and a list of reasons."""
    lines = "\n".join(f"- {reason}." for reason in reasons)
    return f"{text_table(table.heads, table.rows)}\n\n{note}\n\n{lines}"


def libraries(name: str) -> str:
    """Returns the agreement of parameters with other libraries: `experiments.agree`."""
    record = load(name)
    note = f"Compared with {_commits(record)}. Reasons for the differences:"
    return _with_reasons(agree.table(record["methods"]), note, agree.reasons(record["methods"]))


def memory(name: str) -> str:
    """Returns peak memory by number of clients: `experiments.many_clients`."""
    record, counts = load(name), (100, 1000, 10_000)
    labels = {"this library": "fedavg", "PFLlib": "PFLlib, fedavg", "FL-bench": "FL-bench, fedavg"}
    rows = []
    for label, key in labels.items():
        peaks = {row["clients"]: row["peak"] / 2**30 for row in record[key] if row["ok"]}
        rows.append([label, *(f"{peaks[n]:.2f}" if n in peaks else "" for n in counts)])
    return text_table([f"{n:,} clients" for n in counts], rows)


def agreed(name: str) -> str:
    """Returns how many methods have the same parameters as in other libraries."""
    rows = []
    for key, methods in load(name)["methods"].items():
        agreeing = sum(result["verdict"] == "same" for result in methods.values())
        rows.append([rivals.NAMES[key], str(len(methods)), str(agreeing)])
    return text_table(["methods compared", "same parameters"], rows)


def accuracies(name: str) -> str:
    """Returns accuracies before local training: `experiments.agree --rounds`."""
    record, stages = load(name), ("before",)
    length = f"After {record['rounds']} rounds, over {record['seeds']} seeds"
    note = f"{length}, with {_commits(record)}. Reasons for the asterisks:"
    return _with_reasons(scored.table(record, stages), note, scored.reasons(record, stages))


def leaderboard(name: str) -> str:
    """Returns the table of a partition of `experiments.leaderboard` without chosen settings."""
    column = load("leaderboard.json")["columns"][name]
    full = board.table(name, column)
    rows, variants = ([row[:-1] for row in part] for part in (full.rows, full.variants))
    table = full._replace(heads=full.heads[:-1], rows=rows, variants=variants)
    commits = ", ".join(board.commits({"columns": {name: column}}))
    return f"{text_tables.markdown([table])}\n\nMade with commit {commits}."


def stress() -> str:
    """Returns the table of faults and of the runs that survived them."""
    record = json.loads((DOCS.parent / "tests" / "stress" / "measured.json").read_text())
    rows = [
        [kind, str(tried), str(survived), str(lost), part["date"]]
        for part in record.values()
        for kind, tried, survived, lost, _ in part["rows"]
        if not kind.startswith("- ")  # parts of the row above
    ]
    head = ["tried", "survived", "lost", "measured"]
    return text_tables.markdown([text_tables.Table("", head, rows)])


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
    column_names = columns.split(",")
    (table,) = agreement.comparison(RESULTS, TABLES, name, column_names, rows)
    table, values = _without_equal_columns(table, ("seeds", "partitions", "rounds", "agrees"))
    missing = [] if rows else agreement.not_run(RESULTS, TABLES, name, column_names)
    notes = {"All rows": values, "Not run": ", ".join(missing)}
    lines = [f"{key}: {note}." for key, note in notes.items() if note]
    return "\n\n".join([text_tables.markdown([table]), *lines])


def lengths(name: str, column: str, *rounds: str) -> str:
    """Returns the accuracy of a column's rows after several numbers of rounds.

    The mean is over the seeds that were evaluated at all of these rounds; rows without such seeds
    are left out.
    """
    curves = load(f"{name.replace('/', '-')}-full.json")["curves"]
    numbers, stage = [int(number) for number in rounds], TABLES[name].reported
    rows = []
    for row in TABLES[name].rows:
        by_seed = curves.get(f"{row}/{column}", {}).values()
        seeds = [dict(zip(curve["round"], curve[stage], strict=True)) for curve in by_seed]
        seeds = [curve for curve in seeds if {*numbers} <= {*curve}]
        if seeds:
            means = [statistics.mean(curve[number] for curve in seeds) for number in numbers]
            rows.append([row, *(f"{mean:.1f}" for mean in means), str(len(seeds))])
    return text_tables.markdown([text_tables.Table("", [*rounds, "seeds"], rows)])


def _without_equal_columns(
    table: text_tables.Table, heads: Sequence[str]
) -> tuple[text_tables.Table, str]:
    """Returns a table without those columns that are equal in all rows, and their values."""
    columns = dict(
        zip(table.heads, zip(*(r[1:] for r in table.all_rows), strict=True), strict=True)
    )
    values = {head: columns[head][0] for head in heads if len({*columns[head]}) == 1}
    indices = [i for i, head in enumerate(table.heads) if head not in values]
    rows, variants = (
        [[row[0], *(row[i + 1] for i in indices)] for row in part]
        for part in (table.rows, table.variants)
    )
    heads = [table.heads[i] for i in indices]
    table = table._replace(heads=heads, rows=rows, variants=variants)
    return table, ", ".join(f"{head} = {value}" for head, value in values.items())


MARKS: dict[str, Callable[..., str]] = {
    "docstring": docstring,
    "settings": settings,
    "presets": presets,
    "listing": list_kind,
    "tables": tables,
    "speed": measurement_tables.speed,
    "rounds": measurement_tables.rounds,
    "goals": measurement_tables.goals,
    "profile": measurement_tables.profile,
    "libraries": libraries,
    "accuracies": accuracies,
    "memory": memory,
    "server": lambda name: text_tables.markdown([server_share.table(load(name))]),
    "agreed": agreed,
    "leaderboard": leaderboard,
    "privacy": privacy,
    "released": released,
    "correlated": lambda: correlated_noise.compare(1000, 50, 400, (4, 8), 1e-5),
    "stress": stress,
    "summary": summary,
    "cells": cells,
    "lengths": lengths,
    "gaps": lambda paper: gaps.page_part(RESULTS, TABLES, paper),
}


if __name__ == "__main__":
    for path in [*sorted(DOCS.glob("*.md")), *sorted(RESULTS.glob("*.md"))]:
        text = path.read_text()
        if (new := update(text)) != text:
            path.write_text(new)
            print(path.name)
