"""Leaderboard as text, pictures, and a page with sortable tables."""

import html
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.metrics import ACCURACY
from fedjax_pfl.report import drawing, html_page, method_labels, text_tables
from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.numbers import format_mean_std
from fedjax_pfl.report.text_tables import Table

HEADS = ["before", "after", "worst 10 %", "MB", "seconds", "settings"]
# A click on a head sorts by its column; a second click reverses the order.
_SORT = """<script>
for (const head of document.querySelectorAll("th[scope=col]")) {
  head.style.cursor = "pointer";
  head.onclick = () => {
    const table = head.closest("table"), body = table.tBodies[0];
    const at = [...head.parentNode.children].indexOf(head);
    const value = row => parseFloat(row.children[at].textContent);
    const up = head.dataset.up = head.dataset.up === "1" ? "0" : "1";
    const sign = up === "1" ? -1 : 1;
    const of = row => Number.isNaN(value(row)) ? sign * Infinity : value(row);
    body.append(...[...body.rows].sort((a, b) => sign * (of(a) - of(b))));
  };
}
</script>"""


def read(out: Path) -> dict[str, Any]:
    """Reads leaderboard.json in the folder `out`, or returns an empty leaderboard if there is none.

    It is {"columns": {SPLIT: {"about": settings, "methods": {METHOD: line of results}}}}, where a
    split is a dataset and its partition over clients. Raises UsageError if the file is damaged.
    """
    path = out / "leaderboard.json"
    if not path.exists():
        return {"columns": {}}
    try:
        leaderboard: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        text(leaderboard)
        commits(leaderboard)
        return leaderboard
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise UsageError(
            f"{path} is damaged; bring it back from a copy, or move it away: a new one has only "
            "the splits and methods that are run again"
        ) from None


def column(leaderboard: dict[str, Any], name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the column of a split: {"about": settings, "methods": lines of results by method}.

    It is added to the leaderboard, in place, if missing, and emptied if its settings have changed.
    """
    columns, json_about = leaderboard["columns"], json.loads(json.dumps(about))
    if name not in columns or columns[name]["about"] != json_about:
        columns[name] = {"about": json_about, "methods": {}}
    entry: dict[str, Any] = columns[name]
    return entry


def with_commit(
    line: Mapping[str, Any], commit: str, old: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns a method's results with the key "commit": the library's commit that computed them.

    If the `old` results are equal to the new ones, their commit stays.
    """
    is_equal = old is not None and {**old, "commit": commit} == {**line, "commit": commit}
    return {**line, "commit": old.get("commit", commit) if old and is_equal else commit}


def ranked(methods: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns (method, line) sorted by mean score before local training, best first.

    `methods` are lines of results by name. Methods without a score come last.
    """

    def score(line: Mapping[str, Any]) -> float:
        mean = line.get("before", {}).get("mean", math.nan)
        return -math.inf if math.isnan(mean) else mean

    return sorted(methods.items(), key=lambda entry: -score(entry[1]))


def table(name: str, column: Mapping[str, Any]) -> Table:
    """Returns the table of a split, best method first; `column` is as returned by `column`.

    A method with another number of seeds than most methods has its number in its label.
    """
    about, labels = column["about"], _labels(column["methods"])
    settings = "".join(f", {key}={value}" for key, value in about.get("settings", {}).items())
    caption = (
        f"{name} ({about['words']}{settings}), {about['rounds']} rounds of {about['local_epochs']} "
        f"local epochs: accuracy in per cent, {_spread(column['methods'])}. "
        f"Settings are the best of {about['budget']} on validation examples."
    )
    papers, variants = (
        [[labels[name], *_cells(line)] for name, line in part]
        for part in _papers_and_variants(column["methods"])
    )
    return Table(caption=caption, heads=HEADS, rows=papers, variants=variants)


def _spread(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what the scores are over the seeds of most methods, and how many seeds these are."""
    counts = _seed_counts(methods)
    most_common = counts.most_common(1)[0][0] if counts else 0
    seeds = _count(most_common) + " unless stated otherwise" * (len(counts) > 1)
    return f"mean ± sample standard deviation over {seeds}" if most_common > 1 else f"of {seeds}"


def _seed_counts(methods: Mapping[str, Mapping[str, Any]]) -> Counter[int]:
    """Returns how many methods have each number of seeds."""
    return Counter(len(line["seeds"]) for line in methods.values() if "cannot" not in line)


def _labels(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns labels by method, with the number of seeds if most methods have another number."""
    most_common = _seed_counts(methods).most_common(1)
    labels = {}
    for name, line in methods.items():
        labels[name] = method_labels.table_label(name)
        if "cannot" not in line and len(line["seeds"]) != most_common[0][0]:
            labels[name] += f", {_count(len(line['seeds']))}"
    return labels


def _count(seeds: int) -> str:
    return f"{seeds} seed" if seeds == 1 else f"{seeds} seeds"


def _papers_and_variants(
    methods: Mapping[str, Mapping[str, Any]],
) -> list[list[tuple[str, Mapping[str, Any]]]]:
    """Returns two lists of (method, its results), best first: methods of papers, and variants.

    `methods` are results by name of the method. Variants are this library's own.
    """
    lines = ranked(methods)
    return [
        [x for x in lines if method_labels.is_variant(x[0]) is variant] for variant in (False, True)
    ]


def _cells(line: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a method's row, one for each of HEADS.

    `line` has its results, or the reason why it cannot run, which is shown after a "–".
    """
    if "cannot" in line:
        return ["–"] * (len(HEADS) - 1) + [line["cannot"]]
    spreads = [line[key] for key in ("before", "after", "worst tenth")]
    cells = [format_mean_std(spread, ACCURACY) if spread else "–" for spread in spreads]
    return [*cells, f"{line['megabytes']:.3g}", f"{line['seconds']:.3g}", line["settings"]]


def text(leaderboard: Mapping[str, Any]) -> str:
    """Returns the tables of all splits as plain text."""
    columns = {name: c for name, c in leaderboard["columns"].items() if c["methods"]}
    if not columns:
        return "no method has finished yet"
    return text_tables.text([table(name, column) for name, column in columns.items()])


def commits(leaderboard: Mapping[str, Any]) -> list[str]:
    """Returns the different commits of all lines of results, sorted."""
    columns = leaderboard["columns"].values()
    lines = [line for column in columns for line in column["methods"].values()]
    return sorted({line["commit"] for line in lines})


def draw(name: str, column: Mapping[str, Any]) -> Picture:
    """Draws the scores of a split's methods before and after local training, best on top."""
    papers, variants = (
        [entry for entry in reversed(part) if "before" in entry[1]]
        for part in _papers_and_variants(column["methods"])
    )
    lines = [*variants, *papers]  # from the bottom up
    labels = _labels(column["methods"])
    figure, axes = drawing.new_axes(f"Accuracy on {name}", 1.4 + 0.24 * len(lines))
    for stage in ("after", "before"):
        points = [(line[stage], y) for y, (_, line) in enumerate(lines) if line[stage]]
        axes.errorbar(
            [100 * spread["mean"] for spread, _ in points],
            [y for _, y in points],
            xerr=[100 * (spread["std"] or 0.0) for spread, _ in points],
            fmt=drawing.STAGE_MARKERS[stage],
            color=drawing.STAGE_COLOURS[stage],
            markersize=5,
            linewidth=1.2,
            label=f"{stage} local training",
        )
    axes.set_yticks(range(len(lines)), [labels[name] for name, _ in lines])
    if variants:
        axes.axhline(len(variants) - 0.5, color=drawing.INK, linewidth=0.8)
    axes.set_xlabel(f"accuracy (%), {_spread(column['methods'])}")
    drawing.legend(axes)
    scored = [
        entry
        for entry in ranked(dict(lines))
        if math.isfinite(entry[1]["before"].get("mean", math.nan))
    ]
    best = method_labels.table_label(scored[0][0]) if scored else "none"
    caption = "Methods by their score before local training, each with the settings chosen for it."
    return Picture(figure, caption, f"{len(lines)} methods; the best before training is {best}.")


def page(leaderboard: Mapping[str, Any]) -> str:
    """Returns an HTML page with a sortable table and a picture for each split."""
    blocks = []
    for name, column in leaderboard["columns"].items():
        if not column["methods"]:
            continue
        ranking = table(name, column)
        rows, variants = (
            [[html.escape(label), *cells] for label, *cells in part]
            for part in (ranking.rows, ranking.variants)
        )
        block = html_page.table_block(ranking.caption, ranking.heads, rows, variants)
        picture = html_page.figure_block(draw(name, column), name)
        blocks.append(html_page.section(html.escape(name), block, picture))
    facts = [f"commit {', '.join(commits(leaderboard))}", "a click on a head sorts by it"]
    return html_page.page("Leaderboard", facts, "\n".join(blocks) + _SORT)


def write(leaderboard: Mapping[str, Any], out: Path) -> None:
    """Writes leaderboard.json, .txt, .html, and SPLIT.svg for each split, to the folder `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        content = json.dumps(leaderboard, indent=1, ensure_ascii=False)
        part = out / f"leaderboard-{os.getpid()}.part"  # another call may read the file
        part.write_text(content + "\n", encoding="utf-8")
        part.replace(out / "leaderboard.json")
        (out / "leaderboard.txt").write_text(text(leaderboard) + "\n", encoding="utf-8")
        (out / "leaderboard.html").write_text(page(leaderboard), encoding="utf-8")
        for name, column in leaderboard["columns"].items():
            if column["methods"]:
                svg = html_page.svg_file(draw(name, column).figure, name)
                (out / f"{name}.svg").write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror})") from None
