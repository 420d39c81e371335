"""The leaderboard as a text, a picture, and a page whose table can be sorted."""

import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.scores import ACCURACY
from fedjax_pfl.report import drawing, html_page, method_labels, text_tables
from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.numbers import mean_and_deviation
from fedjax_pfl.report.text_tables import Table

HEADS = ["before", "after", "worst 10 %", "MB", "seconds", "settings"]
# A click on a head sorts by its column, a second one the other way round.
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
    """leaderboard.json of earlier calls, or an empty one."""
    path = out / "leaderboard.json"
    if not path.exists():
        return {"columns": {}}
    try:
        whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        text(whole)
        commits(whole)
        return whole
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise UsageError(
            f"{path} is damaged; bring it back from a copy, or move it away: a new one has only "
            "the splits and methods that are run again"
        ) from None


def column(whole: dict[str, Any], name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """A split's table in the whole: begun anew where what is run has changed."""
    columns, plain = whole["columns"], json.loads(json.dumps(about))
    if name not in columns or columns[name]["about"] != plain:
        columns[name] = {"about": plain, "methods": {}}
    found: dict[str, Any] = columns[name]
    return found


def dated(line: Mapping[str, Any], commit: str, old: Mapping[str, Any] | None) -> dict[str, Any]:
    """A line with the commit that it was made with, which is an earlier one if it is the same."""
    same = old is not None and {**old, "commit": commit} == {**line, "commit": commit}
    return {**line, "commit": old.get("commit", commit) if old and same else commit}


def ranked(methods: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """From the best score before local training to the worst; what cannot be run last."""

    def score(line: Mapping[str, Any]) -> float:
        mean = line.get("before", {}).get("mean", math.nan)
        return -math.inf if math.isnan(mean) else mean

    return sorted(methods.items(), key=lambda entry: -score(entry[1]))


def table(name: str, column: Mapping[str, Any]) -> Table:
    """A split's methods, in their rank."""
    about = column["about"]
    more = "".join(f", {key}={value}" for key, value in about.get("settings", {}).items())
    caption = (
        f"{name} ({about['words']}{more}), {about['rounds']} rounds of {about['local_epochs']} "
        "local epochs: accuracy in per cent, mean ± sample standard deviation over seeds. Settings "
        f"are the best of {about['budget']} on validation examples."
    )
    papers, variants = (
        [[method_labels.row(name), *_cells(line)] for name, line in part]
        for part in _apart(column["methods"])
    )
    return Table(caption, HEADS, papers, variants)


def _apart(methods: Mapping[str, Mapping[str, Any]]) -> list[list[tuple[str, Mapping[str, Any]]]]:
    """Lines of the papers' methods in their rank, and those of this library's variants."""
    lines = ranked(methods)
    return [[x for x in lines if method_labels.is_variant(x[0]) is own] for own in (False, True)]


def _cells(line: Mapping[str, Any]) -> list[str]:
    if "cannot" in line:
        return ["–"] * (len(HEADS) - 1) + [line["cannot"]]
    spreads = [line[key] for key in ("before", "after", "worst tenth")]
    return [
        *(mean_and_deviation(one, ACCURACY) if one else "–" for one in spreads),
        f"{line['megabytes']:.3g}",
        f"{line['seconds']:.3g}",
        line["settings"],
    ]


def text(whole: Mapping[str, Any]) -> str:
    """All splits, for a terminal."""
    there = {name: one for name, one in whole["columns"].items() if one["methods"]}
    if not there:
        return "no method has finished yet"
    return text_tables.text([table(name, one) for name, one in there.items()])


def commits(whole: Mapping[str, Any]) -> list[str]:
    """With which lines were made."""
    lines = [line for each in whole["columns"].values() for line in each["methods"].values()]
    return sorted({line["commit"] for line in lines})


def draw(name: str, column: Mapping[str, Any]) -> Picture:
    """A line for each method: its score before and after local training."""
    papers, variants = (
        [entry for entry in reversed(part) if "before" in entry[1]]
        for part in _apart(column["methods"])
    )
    lines = [*variants, *papers]  # from the bottom up
    figure: Figure
    figure, axes = drawing.canvas(f"Accuracy on {name}", 1.4 + 0.24 * len(lines))
    for stage, marker, colour in zip(
        ("after", "before"), "so", drawing.COLOURS[1::-1], strict=True
    ):
        shown = [(line[stage], y) for y, (_, line) in enumerate(lines) if line[stage]]
        axes.errorbar(
            [100 * one["mean"] for one, _ in shown],
            [y for _, y in shown],
            xerr=[100 * (one["std"] or 0.0) for one, _ in shown],
            fmt=marker,
            color=colour,
            markersize=5,
            linewidth=1.2,
            label=f"{stage} local training",
        )
    axes.set_yticks(range(len(lines)), [method_labels.row(name) for name, _ in lines])
    if variants:
        axes.axhline(len(variants) - 0.5, color=drawing.INK, linewidth=0.8)
    axes.set_xlabel("accuracy (%), mean and deviation over seeds")
    drawing.legend(axes)
    best = method_labels.row(lines[-1][0]) if papers else "none"
    caption = "Methods by their score before local training, each with the settings chosen for it."
    return Picture(figure, caption, f"{len(lines)} methods; the best before training is {best}.")


def page(whole: Mapping[str, Any]) -> str:
    """Tables that can be sorted, and pictures."""
    blocks = []
    for name, column in whole["columns"].items():
        if not column["methods"]:
            continue
        one = table(name, column)
        rows, variants = (
            [[html.escape(label), *cells] for label, *cells in part]
            for part in (one.rows, one.variants)
        )
        shown = html_page.table_block(one.caption, one.heads, rows, variants)
        picture = html_page.figure_block(draw(name, column), name)
        blocks.append(f"<section>\n<h2>{html.escape(name)}</h2>\n{shown}\n{picture}\n</section>")
    facts = [f"commit {', '.join(commits(whole))}", "a click on a head sorts by it"]
    return html_page.page("Leaderboard", facts, "\n".join(blocks) + _SORT)


def write(whole: Mapping[str, Any], out: Path) -> None:
    """leaderboard.json, .txt, .html, and a picture of each split, .svg."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        plain = json.dumps(whole, indent=1, ensure_ascii=False)
        (out / "leaderboard.json").write_text(plain + "\n", encoding="utf-8")
        (out / "leaderboard.txt").write_text(text(whole) + "\n", encoding="utf-8")
        (out / "leaderboard.html").write_text(page(whole), encoding="utf-8")
        for name, column in whole["columns"].items():
            if column["methods"]:
                drawn = html_page.svg_file(draw(name, column).figure, name)
                (out / f"{name}.svg").write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror})") from None
