"""Rows of runs side by side: tables in four formats, curves, and a page of them."""

import html
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.scores import Metric
from fedjax_pfl.report import comparison, csv_tables, drawing, figures, text_tables
from fedjax_pfl.report import html_page as report
from fedjax_pfl.report.comparison import Paired, Row
from fedjax_pfl.report.numbers import in_unit, mean_and_deviation, metric_of, word
from fedjax_pfl.report.text_tables import Table


def tables(rows: Sequence[Row]) -> list[Table]:
    """The results, and the tests against the first row where there is another."""
    metric = metric_of(rows[0].runs[0].metrics)
    alone = [comparison.better_than_alone(row, rows) for row in rows]
    fair = any(share is not None for share in alone)
    said = (
        " gain %: the share of clients that a method serves better than Local does." if fair else ""
    )
    results = _table(
        "Results",
        f"{word(metric)}{in_unit(metric)} before and after local training at the last evaluation, "
        "and of the worst tenth of the clients before it: mean ± sample standard deviation over "
        f"seeds. Megabytes are those of all clients, mean over seeds.{said}",
        ["before", "after", "worst 10 %", "MB down", "MB up", "rounds", "seeds"]
        + ["gain %"] * fair,
        [
            (row, [*_results(row, metric), *[_share(one)] * fair])
            for row, one in zip(rows, alone, strict=True)
        ],
    )
    diagnostics = _diagnostics(rows)
    if len(rows) < 2:
        return [results, *diagnostics]
    points = " in points" if metric.unit == "%" else ""
    return [
        results,
        _table(
            "Paired tests",
            f"Mean difference{points} to {_label(rows[0])}, and p of Wilcoxon's signed-rank test "
            "over clients, each with its mean over seeds, before and after local training.",
            ["before", "p", "after", "p", "clients"],
            [(row, _tests(row, rows[0], metric)) for row in rows[1:]],
        ),
        *_extremes(rows, metric),
        *diagnostics,
    ]


def _table(
    title: str, caption: str, heads: list[str], rows: Sequence[tuple[Row, list[str]]]
) -> Table:
    """A table of rows and their cells, with this library's variants below a line."""
    papers, variants = (
        [[_label(row), *cells] for row, cells in rows if comparison.is_variant(row) is which]
        for which in (False, True)
    )
    return Table(caption, heads, papers, variants, title)


def _extremes(rows: Sequence[Row], metric: Metric) -> list[Table]:
    """Who gains and who loses most, where clients have names."""
    found = [(row, comparison.extremes(row, rows[0], "before")) for row in rows[1:]]
    cells = [
        (row, [f"{name} {_difference(value, metric)}" for name, value in both])
        for row, both in found
        if both
    ]
    caption = (
        f"The client that gains most and the one that gains least against {_label(rows[0])}, "
        "before local training, mean over seeds."
    )
    return [_table("Clients", caption, ["most", "least"], cells)] if cells else []


def _difference(value: float, metric: Metric) -> str:
    return f"{100 * value:+.2f}" if metric.unit == "%" else f"{value:+.4g}"


def _diagnostics(rows: Sequence[Row]) -> list[Table]:
    """The signs of the methods that have some, in columns."""
    each = [comparison.diagnostic_values(row) for row in rows]
    names = list(dict.fromkeys(name for signs in each for name in signs))
    if not names:
        return []

    def show(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    return [
        _table(
            "Diagnostics",
            "Diagnostics at the last evaluation, means over layers and seeds: whether a method's "
            "own mechanism acts. What each is stands in the report of a run.",
            [name.replace("_", " ") for name in names],
            [
                (row, [show(signs.get(name)) for name in names])
                for row, signs in zip(rows, each, strict=True)
                if signs
            ],
        )
    ]


def _label(row: Row) -> str:
    note = comparison.unfinished(row)
    return f"{row.label} ({note})" if note else row.label


def _results(row: Row, metric: Metric) -> list[str]:
    found = comparison.summary(row)
    low, high = found.rounds
    return [
        *(_spread(value, metric) for value in (found.before, found.after, found.worst10)),
        _megabytes(found.megabytes_down),
        _megabytes(found.megabytes_up),
        f"{low}" if low == high else f"{low}–{high}",
        f"{len(row.runs)}",
    ]


def _spread(value: Mapping[str, Any] | None, metric: Metric) -> str:
    if value is None:
        return "–"
    return mean_and_deviation(value, metric)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}"


def _megabytes(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _tests(row: Row, first: Row, metric: Metric) -> list[str]:
    both = [comparison.paired(row, first, stage) for stage in drawing.STAGES]
    cells = []
    for stage, found in zip(drawing.STAGES, both, strict=True):
        if isinstance(found, Paired):
            p = f"{found.p:.4f}" if found.p >= 1e-4 else f"{found.p:.1e}"
            cells += [_difference(found.difference, metric), p]
        else:
            cells += ["–", "not paired" if _evaluated(row, first, stage) else "–"]
    return [*cells, f"{both[0].pairs}" if isinstance(both[0], Paired) else both[0]]


def _evaluated(row: Row, first: Row, stage: str) -> bool:
    return all(run.metrics[-1].get(stage) for one in (row, first) for run in one.runs)


def text(rows: Sequence[Row]) -> str:
    """At most 100 columns wide; labels are wrapped."""
    return text_tables.text(tables(rows))


def markdown(rows: Sequence[Row]) -> str:
    """A paragraph and a table each."""
    return text_tables.markdown(tables(rows))


def latex(rows: Sequence[Row]) -> str:
    """Tables that need no package."""
    return text_tables.latex(tables(rows))


def as_csv(rows: Sequence[Row]) -> str:
    """One line per row, numbers in full: scores as recorded (an accuracy of 1 is all), bytes/1e6.

    `paired_clients` says why a row is not paired with the first.
    """
    metric = metric_of(rows[0].runs[0].metrics)
    written: list[dict[str, Any]] = []
    for row in rows:
        found = comparison.summary(row)
        line: dict[str, Any] = {"label": row.label, "unfinished": comparison.unfinished(row)}
        for stage in ("before", "after", "worst10"):
            value = getattr(found, stage) or {}
            line |= {f"{metric.name}_{stage}_{key}": value.get(key) for key in ("mean", "std")}
        line |= {"better_than_alone": comparison.better_than_alone(row, rows)}
        line |= {"megabytes_down": found.megabytes_down, "megabytes_up": found.megabytes_up}
        line |= {"rounds": found.rounds[0], "most_rounds": found.rounds[1], "seeds": len(row.runs)}
        tests = {s: row is rows[0] or comparison.paired(row, rows[0], s) for s in drawing.STAGES}
        for stage, test in tests.items():
            both = test if isinstance(test, Paired) else None
            line |= {f"difference_{stage}": both and both.difference, f"p_{stage}": both and both.p}
        test = tests["before"]
        pairs = test.pairs if isinstance(test, Paired) else f"not paired: {test}"
        line |= {"paired_clients": None if row is rows[0] else pairs}
        written.append(
            line | {f"observed_{k}": v for k, v in comparison.diagnostic_values(row).items()}
        )
    buffer = io.StringIO()
    csv_tables.write(buffer, written)
    return buffer.getvalue().rstrip("\n")


FORMATS: dict[str, tuple[Callable[[Sequence[Row]], str], str]] = {
    "text": (text, "txt"),
    "markdown": (markdown, "md"),
    "latex": (latex, "tex"),
    "csv": (as_csv, "csv"),
}


def write(rows: Sequence[Row], out: Path) -> Path:
    """Tables in every format, the curves, and the page, which is whole when it is there."""
    made = tables(rows)  # once: of 100,000 clients it takes seconds
    texts = {
        "txt": text_tables.text(made),
        "md": text_tables.markdown(made),
        "tex": text_tables.latex(made),
        "csv": as_csv(rows),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for suffix, content in texts.items():
            (out / f"compare.{suffix}").write_text(content + "\n", encoding="utf-8")
        metric = metric_of(rows[0].runs[0].metrics)
        picture = figures.curves({_label(row): comparison.curve(row) for row in rows}, metric)
        (out / "compare.png").write_bytes(report.png(picture.figure))
        part = out / "compare.html.part"
        part.write_text(_page(rows, made, picture), encoding="utf-8")
        return part.replace(out / "compare.html")
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror})") from None


def _page(rows: Sequence[Row], made: Sequence[Table], picture: drawing.Picture) -> str:
    each = [dict(report.flat(row.config)) for row in rows]
    shared = [(k, v) for k, v in each[0].items() if all(one.get(k) == v for one in each)]
    datasets = dict.fromkeys(str(row.config.get("dataset", "?")) for row in rows)
    count = sum(len(row.runs) for row in rows)
    facts = [", ".join(datasets), f"{count} run" + "s" * (count > 1)]
    sections = "\n".join(
        f"<section>\n<h2>{table.title}</h2>\n"
        + report.table_block(
            table.caption,
            table.heads,
            *(
                [[_breakable(label), *cells] for label, *cells in part]
                for part in (table.rows, table.variants)
            ),
        )
        + "\n</section>"
        for table in made
    )
    runs = [
        [_breakable(row.label), str(run.seed), str(run.metrics[-1]["round"]), str(run.directory)]
        for row in rows
        for run in row.runs
    ]
    body = f"""{sections}
<section>
<h2>Curves</h2>
{report.figure_block(picture, "curves")}
</section>
<section>
<h2>Runs</h2>
{report.table_block("What each row is made of.", ["seed", "rounds", "directory"], runs)}
</section>
{report.settings_block("Settings that all have in common", shared)}"""
    many = len(rows) > 1
    return report.page(
        f"{len(rows)} configurations compared" if many else _label(rows[0]), facts, body
    )


def _breakable(label: str) -> str:
    return "<br>".join(html.escape(line) for line in textwrap.wrap(label, 28))
