"""The report of one run: figures, a self-contained HTML page and a table for the terminal.

Reads what `runner.py` wrote to a run directory: `config.json`, `metrics.jsonl` (one line per
evaluation; bytes, seconds and counts are totals since round 0), `clients.csv`, `traffic.json`.
"""

import base64
import csv
import html
import io
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.engine import vital_signs
from fedjax_pfl.report import figures
from fedjax_pfl.report.figures import Picture, Record, human_bytes, number, score_name, show_score

__all__ = [
    "figure_block",
    "flat",
    "human_bytes",
    "page",
    "png",
    "settings_block",
    "table",
    "table_block",
    "write",
]

_COLUMNS = {"mean": "mean", "weighted": "weighted", "std": "std", "worst10": "worst 10 %"}
_INPUTS = ("config.json", "metrics.jsonl", "clients.csv", "traffic.json")


def write(
    directory: pathlib.Path, extra_figures: Mapping[str, Figure] | None = None
) -> pathlib.Path:
    """Write `figures/*.png` and `report.html` into a run directory; returns the page's path.

    extra_figures: drawn by the caller, by name; they follow the run's own figures. The name becomes
    the file's name and the heading; the caption is the figure's label (`figure.set_label`), if any.
    A figure that has nothing to show is left out: no traffic where a method moves no bytes.
    """
    missing = [name for name in _INPUTS if not (directory / name).is_file()]
    if missing:
        raise UsageError(f"{directory} is not a finished run: it lacks {', '.join(missing)}")
    config = json.loads((directory / "config.json").read_text())
    traffic = json.loads((directory / "traffic.json").read_text())
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines if line.strip()]
    if not metrics:
        raise UsageError(f"{directory} is not a finished run: metrics.jsonl holds no evaluation")
    with (directory / "clients.csv").open(newline="") as file:
        clients = list(csv.DictReader(file))

    pictures = figures.draw(metrics, clients, traffic)
    for name, figure in (extra_figures or {}).items():
        words = re.sub(r"[\W_]+", " ", name).strip().capitalize()
        caption = str(figure.get_label()) or f"{words}."
        pictures[re.sub(r"[^\w.-]+", "_", name)] = Picture(figure, caption, caption)
    images = {name: png(picture.figure) for name, picture in pictures.items()}
    (directory / "figures").mkdir(exist_ok=True)
    for name, image in images.items():
        (directory / "figures" / f"{name}.png").write_bytes(image)

    # Last and at once: where report.html is, the run is finished and the report whole.
    part = directory / "report.html.part"
    part.write_text(_page(config, metrics, pictures, images), encoding="utf-8")
    return part.replace(directory / "report.html")


def table(metrics: Sequence[Record]) -> str:
    """The results as plain text, at most 100 columns wide."""
    name = score_name(metrics)
    heads = [name.replace("_", " ") + (" (%)" if name == "accuracy" else ""), ""]
    rows = [(*heads, *_COLUMNS.values(), "loss")]
    for title, record in _picked(metrics):
        for stage in _stages(record):
            rows.append((title, stage, *_cells(record[stage], name)))
            title = ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    last = metrics[-1]
    down, up = last.get("bytes_down"), last.get("bytes_up")
    lines += [
        f"bytes    {human_bytes(down)} down, {human_bytes(up)} up",
        f"seconds  {_seconds(last.get('seconds'))}{_evaluating(last, '')}, and "
        f"{_seconds(last.get('compile_seconds'))} to compile{_saving(last, '')}",
        f"clients  {last.get('dropped') or 0} dropped out, {last.get('rejected') or 0} rejected",
    ]
    return "\n".join(lines)


def _picked(metrics: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """The last evaluation and, if known, the one that was best on validation examples."""
    last = metrics[-1]
    best = last.get("best_round")
    if best == last["round"]:
        yield f"last and best, round {best}", last
        return
    yield f"last, round {last['round']}", last
    found = [record for record in metrics if record["round"] == best]
    if found:
        yield f"best, round {best}", found[-1]


def _stages(record: Record) -> list[str]:
    return [stage for stage in figures.STAGES if record.get(stage)]


def _cells(numbers: Record, name: str) -> list[str]:
    """Mean, weighted, std, worst 10 % (an accuracy in per cent, without the sign) and the loss."""
    scores = [number(numbers.get(f"{name}_{key}")) for key in _COLUMNS]
    loss = number(numbers.get("loss"))
    return [
        *(show_score(name, value).removesuffix(" %") for value in scores),
        "–" if math.isnan(loss) else f"{loss:.4f}",
    ]


def _seconds(value: Any) -> str:
    seconds = number(value)
    return "–" if math.isnan(seconds) else f"{seconds:,.1f}"


def _evaluating(last: Record, unit: str) -> str:
    """The part of the time that was spent on evaluations; nothing where it was not measured."""
    seconds = last.get("evaluate_seconds")
    return "" if seconds is None else f", {_seconds(seconds)}{unit} of them to evaluate"


def _saving(last: Record, unit: str) -> str:
    """The time that checkpoints took, besides; nothing where it was not measured."""
    seconds = last.get("checkpoint_seconds")
    return "" if seconds is None else f", {_seconds(seconds)}{unit} for checkpoints"


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    return buffer.getvalue()


def _page(
    config: Mapping[str, Any],
    metrics: Sequence[Record],
    pictures: Mapping[str, Picture],
    images: Mapping[str, bytes],
) -> str:
    title = f"{_setting(config, 'algorithm')} on {_setting(config, 'dataset')}"
    facts = [f"{_setting(config, 'partition')} partition", f"seed {_setting(config, 'seed')}"]
    facts[1:1] = [f"{_setting(config, key)} {key}" for key in ("clients", "rounds")]
    drawn = "\n".join(figure_block(pictures[name], images[name]) for name in pictures)
    body = f"""{_warnings(metrics)}
{_headline(metrics)}
{_results(metrics)}
{_learned(config, metrics)}
<section class="figures">
<h2>Figures</h2>
{drawn}
</section>
{settings_block("Settings", flat(config))}"""
    return page(title, facts, body)


def page(title: str, facts: Sequence[str], body: str) -> str:
    """A whole page, which loads nothing: title and facts are text, body is HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<header>
<h1>{html.escape(title)}</h1>
<p class="facts">{html.escape(" · ".join(facts))}</p>
</header>
{body}
</main>
</body>
</html>
"""


def _warnings(metrics: Sequence[Record]) -> str:
    last = metrics[-1]
    said = []
    if last.get("rejected"):
        said.append(f"Uploads rejected, not finite or too large: {last['rejected']:,}.")
    if last.get("dropped"):
        said.append(f"Times that a sampled client dropped out: {last['dropped']:,}.")
    if any(value is None for stage in _stages(last) for value in last[stage].values()):
        said.append("Some final numbers were not finite; they are shown as –.")
    said += [f"After round {last['round']}, {text}." for text in last.get("remarks", ())]
    return "\n".join(f'<p class="warning" role="note">{html.escape(text)}</p>' for text in said)


def _headline(metrics: Sequence[Record]) -> str:
    name = score_name(metrics)
    last = metrics[-1]
    word = name.replace("_", " ").capitalize()
    best = dict(_picked(metrics)).get(f"best, round {last.get('best_round')}")
    cards: list[tuple[str, str, list[str]]] = []
    for stage in _stages(last):
        beneath = [f"mean over clients, round {last['round']}"]
        if best is not None and best.get(stage):
            value = show_score(name, number(best[stage].get(f"{name}_mean")))
            unbroken = value.replace(" ", "\N{NO-BREAK SPACE}")
            beneath.append(f"best round {best['round']}: {unbroken}")
        elif last.get("best_round") == last["round"]:
            beneath.append("also the best round")
        value = show_score(name, number(last[stage].get(f"{name}_mean")))
        cards.append((f"{word} {figures.STAGES[stage]}", value, beneath))
    down, up = number(last.get("bytes_down")), number(last.get("bytes_up"))
    halves = [f"{human_bytes(down)} down", f"{human_bytes(up)} up"]
    cards.append(("Bytes moved", human_bytes(down + up), halves))
    beside = [f"and {_seconds(last.get('compile_seconds'))} s to compile{_saving(last, ' s')}"]
    if evaluating := _evaluating(last, " s").removeprefix(", "):
        beside.insert(0, evaluating)
    cards.append(("Time", f"{_seconds(last.get('seconds'))} s", beside))
    counts = " / ".join(f"{last.get(key) or 0:,}" for key in ("dropped", "rejected"))
    cards.append(("Dropped out / rejected", counts, ["clients, over all rounds"]))
    inside = "\n".join(
        f"<div><dt>{html.escape(head)}</dt><dd><strong>{html.escape(value)}</strong>"
        + "".join(f"<span>{html.escape(line)}</span>" for line in beneath)
        + "</dd></div>"
        for head, value, beneath in cards
    )
    return f'<dl class="cards">\n{inside}\n</dl>'


def _results(metrics: Sequence[Record]) -> str:
    name = score_name(metrics)
    rows = [
        (f"{title}<br><small>{figures.STAGES[stage]}</small>", *_cells(record[stage], name))
        for title, record in _picked(metrics)
        for stage in _stages(record)
    ]
    caption = name.replace("_", " ").capitalize() + (" in per cent" if name == "accuracy" else "")
    caption += " on the clients' test examples, and the loss."
    known = metrics[-1].get("best_round") is not None
    note = "" if known else "<p>There is no best round, as it is chosen on validation examples.</p>"
    return f"""<section>
<h2>Results</h2>
{table_block(caption, (*_COLUMNS.values(), "loss"), rows)}
{note}
</section>"""


def _learned(config: Mapping[str, Any], metrics: Sequence[Record]) -> str:
    """What the method's last vital signs say, in words; nothing where it has none."""
    phase = (config.get("phases") or [{}])[-1]
    method = phase.get("algorithm", config.get("algorithm", ""))
    said = vital_signs.lessons(method, metrics[-1].get("observed", {}))
    if not said:
        return ""
    return f"<section>\n<h2>What was learned</h2>\n<p>{html.escape(' '.join(said))}</p>\n</section>"


def table_block(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a row's first cell is HTML and its head, all else is text."""
    columns = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    body = "\n".join(
        f'<tr><th scope="row">{head}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for head, *cells in rows
    )
    return f"""<div class="wide"><table>
<caption>{html.escape(caption)}</caption>
<thead><tr><td></td>{columns}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>"""


def settings_block(title: str, settings: Iterable[tuple[str, str]]) -> str:
    """Settings and their values under a heading."""
    inside = "\n".join(
        f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>"
        for key, value in settings
    )
    return f"""<section>
<h2>{html.escape(title)}</h2>
<dl class="settings">
{inside}
</dl>
</section>"""


def figure_block(picture: Picture, image: bytes) -> str:
    """A picture, embedded, with its caption."""
    width, height = (round(150 * side) for side in picture.figure.get_size_inches())
    # Panels in a row would be tiny beside another picture.
    panels = len(picture.figure.axes) > 2 and width > 2 * height
    broad = ' class="broad"' if panels else ""
    data = base64.b64encode(image).decode()
    return (
        f'<figure{broad}><img src="data:image/png;base64,{data}" width="{width}" height="{height}" '
        f'alt="{html.escape(picture.alt)}">'
        f"<figcaption>{html.escape(picture.caption)}</figcaption></figure>"
    )


def _setting(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    return "?" if value is None else str(value)


def flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Settings as (dotted name, value), those of sub-configs after the plain ones."""
    for key, value in sorted(config.items(), key=lambda item: (_is_group(item[1]), item[0])):
        if _is_group(value):
            yield from flat(value, f"{above}{key}.")
        else:
            plain = value if isinstance(value, str) else json.dumps(value)
            yield f"{above}{key}", plain


def _is_group(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


_CSS = """
:root { --ink: #1f2328; --soft: #59636e; --paper: #ffffff; --card: #f6f8fa; --line: #d1d9e0;
  --warn: #7d4e00; --warned: #fff8e0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa4af; --paper: #15191e; --card: #20262d; --line: #3a424c;
    --warn: #f2cc60; --warned: #33290f; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .6rem; }
.facts { margin: .3rem 0 1.2rem; color: var(--soft); overflow-wrap: anywhere; }
.warning { margin: .5rem 0; padding: .5rem .8rem; color: var(--warn); background: var(--warned);
  border-left: 4px solid currentColor; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .7rem;
  margin: 1rem 0; }
.cards div { display: grid; grid-row: span 2; grid-template-rows: subgrid; row-gap: 0;
  align-content: start; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; padding: .7rem .9rem; }
dt { color: var(--soft); }
dd { margin: 0; }
.cards dt, .cards span { display: block; font-size: .85rem; line-height: 1.35; color: var(--soft); }
.cards strong { display: block; font-size: 1.5rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .9rem; padding-bottom: .3rem;
  position: sticky; left: 0; max-width: calc(100vw - 2rem); }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
th small, thead th { font-weight: normal; color: var(--soft); }
.figures { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
.figures h2 { grid-column: 1 / -1; margin-bottom: 0; }
figure { margin: 0; }
.broad { grid-column: 1 / -1; }
img { display: block; width: 100%; height: auto; background: #ffffff; padding: .5rem;
  border: 1px solid var(--line); border-radius: .5rem; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .4rem; }
.settings { display: grid; gap: 0 2rem; margin: 0; font-size: .88rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); }
.settings div { display: flex; justify-content: space-between; gap: 1rem; padding: .2rem 0;
  border-bottom: 1px solid var(--line); break-inside: avoid; }
.settings dd { text-align: right; overflow-wrap: anywhere; min-width: 4rem;
  font-family: ui-monospace, monospace; }
@media (max-width: 34rem) {
  table { font-size: .82rem; }
  th, td { padding: .3rem .25rem; }
  th small { white-space: normal; }
}
@media print {
  :root { --ink: #000000; --soft: #444444; --paper: #ffffff; --card: #ffffff; --line: #bbbbbb;
    --warn: #000000; --warned: #ffffff; }
  main { max-width: none; padding: 0; }
  figure, .cards div, .warning { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""
