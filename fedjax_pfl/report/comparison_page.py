"""Comparison of runs: tables in four formats, curves and an HTML page.

`write` fills a folder:

    compare.html               the page
    compare.csv                a line per row of the comparison, with unrounded numbers
    tables/NAME.csv, .tex, .md every table of the page, as printed; NAME is its title
    figures/curves.pdf, .png   the curves, with bands over seeds
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report import (
    comparison,
    comparison_curves,
    csv_text,
    drawing,
    html_page,
    text_tables,
)
from fedjax_pfl.report.comparison import PairedTest, Row
from fedjax_pfl.report.numbers import (
    direction,
    format_mean_std,
    format_p,
    metric_of,
    metric_title,
    privacy_parts,
    unit_suffix,
)
from fedjax_pfl.report.text_tables import Table


def tables(rows: Sequence[Row]) -> list[Table]:
    """Returns the tables of a comparison, in reading order.

    They are results, paired tests of the other rows against the first, the clients that gain most
    and least (if they have names), and the methods' diagnostics (if they have any).
    """
    metric = metric_of(rows[0].runs[0].metrics)
    shares = [comparison.share_better_than_local(row, rows) for row in rows]
    has_local = any(share is not None for share in shares)
    # ε grows with the rounds, and the seeds of a row can stand at different ones.
    last_lines = [[run.metrics[-1] for run in row.runs] for row in rows]
    privacy = [privacy_parts(max(lines, key=lambda line: line["round"])) for lines in last_lines]
    is_private = any(privacy)
    note = " gain %: the share of clients that a method serves better than Local does."
    results = _table(
        "Results",
        f"{metric_title(metric)}{unit_suffix(metric)} before and after local training at the last "
        "evaluation, and of the worst tenth of the clients before it: mean ± sample standard "
        f"deviation over seeds. Megabytes are those of all clients, mean over seeds."
        f"{note * has_local}",
        ["before", "after", "worst 10 %", "MB down", "MB up", "rounds", "seeds"]
        + ["gain %"] * has_local
        + ["ε and δ"] * is_private,
        [
            (
                row,
                [
                    *_results(row, metric),
                    *[_share(share)] * has_local,
                    *[", ".join(parts) or "–"] * is_private,
                ],
            )
            for row, share, parts in zip(rows, shares, privacy, strict=True)
        ],
        [*[direction(metric)] * 3, -1, -1, 0, 0, *[1] * has_local, *[0] * is_private],
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
            [direction(metric), 0, direction(metric), 0, 0],
        ),
        *_extremes(rows, metric),
        *diagnostics,
    ]


def _table(
    title: str,
    caption: str,
    heads: list[str],
    rows: Sequence[tuple[Row, list[str]]],
    best: Sequence[int] = (),
) -> Table:
    """Returns a table; rows whose method is a variant by this library are below a line.

    `heads` are without the labels' head; `best` is as in `Table.best`.
    """
    papers, variants = (
        [[_label(row), *cells] for row, cells in rows if comparison.is_variant(row) is variant]
        for variant in (False, True)
    )
    return Table(
        caption=caption, heads=heads, rows=papers, variants=variants, title=title, best=best
    )


def _extremes(rows: Sequence[Row], metric: Metric) -> list[Table]:
    """Returns a list with one table: the clients that gain most and least against the first row.

    Returns [] if clients have no names.
    """
    pairs = [(row, comparison.extremes(row, rows[0], "before")) for row in rows[1:]]
    cells = [
        (row, [f"{name} {_difference(value, metric)}" for name, value in pair])
        for row, pair in pairs
        if pair
    ]
    caption = (
        f"The client that gains most and the one that gains least against {_label(rows[0])}, "
        "before local training, mean over seeds."
    )
    return [_table("Clients", caption, ["most", "least"], cells)] if cells else []


def _difference(value: float, metric: Metric) -> str:
    return f"{100 * value:+.2f}" if metric.unit == "%" else f"{value:+.4g}"


def _diagnostics(rows: Sequence[Row]) -> list[Table]:
    """Returns a list with the table of the methods' diagnostics, or [] if none has any."""
    values = [comparison.diagnostic_values(row) for row in rows]
    names = list(dict.fromkeys(name for row_values in values for name in row_values))
    if not names:
        return []

    return [
        _table(
            "Diagnostics",
            "Diagnostics at the last evaluation, means over layers and seeds: whether the "
            "mechanism of a method acts. The report of a run explains them.",
            [name.replace("_", " ") for name in names],
            [
                (row, [f"{row_values[n]:.3g}" if n in row_values else "–" for n in names])
                for row, row_values in zip(rows, values, strict=True)
                if row_values
            ],
        )
    ]


def _label(row: Row) -> str:
    note = comparison.unfinished(row)
    return f"{row.label} ({note})" if note else row.label


def _results(row: Row, metric: Metric) -> list[str]:
    """Returns the cells of a row in the table of results, from "before" to "seeds".

    A missing value is "–".
    """
    results = comparison.summary(row)
    low, high = results.rounds
    return [
        *(
            "–" if spread is None else format_mean_std(spread, metric)
            for spread in (results.before, results.after, results.worst10)
        ),
        _megabytes(results.megabytes_down),
        _megabytes(results.megabytes_up),
        f"{low}" if low == high else f"{low}–{high}",
        f"{len(row.runs)}",
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}"


def _megabytes(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _tests(row: Row, first: Row, metric: Metric) -> list[str]:
    """Returns the five cells of a row in the table of paired tests against the row `first`.

    The cells are difference and p before, difference and p after local training, and the number of
    paired clients, or the reason why there are none.
    """
    tests = [comparison.paired_test(row, first, stage) for stage in drawing.STAGES]
    cells = []
    for stage, test in zip(drawing.STAGES, tests, strict=True):
        if isinstance(test, PairedTest):
            cells += [_difference(test.difference, metric), format_p(test.p)]
        else:
            runs = [*row.runs, *first.runs]
            is_evaluated = all(run.metrics[-1].get(stage) for run in runs)
            cells += ["–", "not paired" if is_evaluated else "–"]
    return [*cells, f"{tests[0].pairs}" if isinstance(tests[0], PairedTest) else tests[0]]


def text(rows: Sequence[Row]) -> str:
    """Returns the tables of a comparison as plain text."""
    return text_tables.text(tables(rows))


def markdown(rows: Sequence[Row]) -> str:
    """Returns the tables as Markdown."""
    return text_tables.markdown(tables(rows))


def latex(rows: Sequence[Row]) -> str:
    """Returns the tables as LaTeX."""
    return text_tables.latex(tables(rows))


def as_csv(rows: Sequence[Row]) -> str:
    """Returns CSV: a header and a line per row, with unrounded scores (accuracies from 0 to 1).

    Column `paired_clients` is the number of pairs, or why a row is not paired with the first.
    """
    metric = metric_of(rows[0].runs[0].metrics)
    lines: list[dict[str, Any]] = []
    for row in rows:
        results = comparison.summary(row)
        line: dict[str, Any] = {"label": row.label, "unfinished": comparison.unfinished(row)}
        for stage in ("before", "after", "worst10"):
            value = getattr(results, stage) or {}
            line |= {f"{metric.name}_{stage}_{key}": value.get(key) for key in ("mean", "std")}
        line |= {
            "better_than_alone": comparison.share_better_than_local(row, rows),
            "megabytes_down": results.megabytes_down,
            "megabytes_up": results.megabytes_up,
            "rounds": results.rounds[0],
            "most_rounds": results.rounds[1],
            "seeds": len(row.runs),
        }
        pairs = None
        for stage in drawing.STAGES:
            test = None if row is rows[0] else comparison.paired_test(row, rows[0], stage)
            paired = test if isinstance(test, PairedTest) else None
            line[f"difference_{stage}"] = paired and paired.difference
            line[f"p_{stage}"] = paired and paired.p
            if stage == "before" and test:
                pairs = paired.pairs if paired else f"not paired: {test}"
        observed = comparison.diagnostic_values(row)
        lines.append(
            line | {"paired_clients": pairs} | {f"diagnostic_{k}": v for k, v in observed.items()}
        )
    return csv_text.text(lines).rstrip("\n")


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "text": text,
    "markdown": markdown,
    "latex": latex,
    "csv": as_csv,
}


def write(rows: Sequence[Row], out: Path) -> Path:
    """Writes page, tables and curves of a comparison to the folder `out`; returns compare.html."""
    result_tables = tables(rows)  # takes seconds with 100,000 clients
    metric = metric_of(rows[0].runs[0].metrics)
    picture = comparison_curves.draw(
        {_label(row): comparison.curve(row, metric) for row in rows}, metric
    )
    texts = {"compare.csv": as_csv(rows)}
    for table in result_tables:
        path = f"tables/{table.title.lower().replace(' ', '_')}"
        texts[f"{path}.csv"] = text_tables.as_csv(table)
        texts[f"{path}.tex"] = text_tables.latex([table])
        texts[f"{path}.md"] = text_tables.markdown([table])
    try:
        for folder in ("tables", "figures"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        for name, content in texts.items():
            (out / name).write_text(content + "\n", encoding="utf-8")
        (out / "figures" / "curves.png").write_bytes(html_page.png(picture.figure))
        (out / "figures" / "curves.pdf").write_bytes(html_page.pdf(picture.figure))
        part = out / "compare.html.part"
        part.write_text(_page(rows, result_tables, picture), encoding="utf-8")
        return part.replace(out / "compare.html")
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror})") from None


def _page(rows: Sequence[Row], result_tables: Sequence[Table], picture: drawing.Picture) -> str:
    """Returns the page as HTML."""
    configs = [dict(html_page.flatten(row.config)) for row in rows]
    shared = [(k, v) for k, v in configs[0].items() if all(c.get(k) == v for c in configs)]
    datasets = dict.fromkeys(str(row.config.get("dataset", "?")) for row in rows)
    count = sum(len(row.runs) for row in rows)
    facts = [", ".join(datasets), f"{count} run" + "s" * (count > 1)]
    sections = []
    for table in result_tables:
        papers, variants = (
            [[html_page.breakable(label, 28), *cells] for label, *cells in part]
            for part in (table.rows, table.variants)
        )
        block = html_page.table_block(table.caption, table.heads, papers, variants)
        sections.append(html_page.section(table.title, block))
    runs = [
        [
            html_page.breakable(row.label, 28),
            str(run.seed),
            str(run.metrics[-1]["round"]),
            str(run.directory),
        ]
        for row in rows
        for run in row.runs
    ]
    run_table = html_page.table_block("Runs of each row.", ["seed", "rounds", "directory"], runs)
    sections += [
        html_page.section("Curves", html_page.figure_block(picture, "curves")),
        html_page.section("Runs", run_table),
        html_page.settings_block("Settings that all have in common", shared),
    ]
    title = f"{len(rows)} configurations compared" if len(rows) > 1 else _label(rows[0])
    return html_page.page(title, facts, "\n".join(sections))
