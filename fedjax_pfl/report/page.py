"""The report of one run: figures, a self-contained HTML page and a table for the terminal.

Bytes, seconds and counts of an evaluation are totals since round 0.
"""

import html
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedjax_pfl.core import diagnostics
from fedjax_pfl.core.scores import Metric
from fedjax_pfl.report import (
    client_figures,
    comparison,
    drawing,
    figures,
    method_labels,
    references,
)
from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.html_page import (
    figure_block,
    flat,
    page,
    png,
    settings_block,
    settings_list,
    table_block,
)
from fedjax_pfl.report.numbers import (
    human_bytes,
    in_unit,
    metric_of,
    metrics_of,
    number,
    show_score,
    spoken,
    without_sign,
    word,
)
from fedjax_pfl.report.run_reader import Record, Run, known_settings, read_deviation

_MOST_CLIENTS = 50  # in a table
_COLUMNS = {"mean": "mean", "weighted": "weighted", "std": "std", "worst10": "worst 10 %"}


def write(
    run: Run,
    extra_figures: Mapping[str, Figure] | None = None,
    beside: Mapping[str, Run] | None = None,
) -> pathlib.Path:
    """Write `figures/*.png` and `report.html` into a run's directory; returns the page's path.

    extra_figures: drawn by the caller, by name; they follow the run's own figures. The name becomes
    the file's name and the heading; the caption is the figure's label (`figure.set_label`), if any.
    A figure that has nothing to show is left out: no traffic where a method moves no bytes.
    beside: finished runs of the same work by their methods' names, which say whether this one's
    method helped. Those that are found beside the run are taken too.
    """
    directory = run.directory
    others = {**references.find(run), **(beside or {})}
    lines = {name: comparison.curve(references.row(other)) for name, other in others.items()}
    pictures = figures.draw(run.metrics, run.clients, run.traffic, lines)
    for name, figure in (extra_figures or {}).items():
        words = re.sub(r"[\W_]+", " ", name).strip().capitalize()
        caption = str(figure.get_label()) or f"{words}."
        pictures[re.sub(r"[^\w.-]+", "_", name)] = Picture(figure, caption, caption)
    (directory / "figures").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        (directory / "figures" / f"{name}.png").write_bytes(png(picture.figure))

    # Last and at once: where report.html is, the run is finished and the report whole.
    part = directory / "report.html.part"
    part.write_text(_page(run, pictures, others), encoding="utf-8")
    return part.replace(directory / "report.html")


def table(metrics: Sequence[Record]) -> str:
    """The results as plain text, at most 100 columns wide."""
    rows: list[tuple[str, ...]] = []
    for metric in metrics_of(metrics):
        head = spoken(metric) + (" (%)" if metric.unit == "%" else "")
        rows.append((head, "", *_COLUMNS.values(), *([] if rows else ["loss"])))
        loss = len(rows) == 1
        for title, record in _picked(metrics):
            for stage in _stages(record):
                rows.append((title, stage, *_cells(record[stage], metric, loss)))
                title = ""
    rows = [(*row, *[""] * (len(rows[0]) - len(row))) for row in rows]
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
    return [stage for stage in drawing.STAGES if record.get(stage)]


def _cells(numbers: Record, metric: Metric, loss: bool = True) -> list[str]:
    """Mean, weighted, std, worst 10 % (a share in per cent, without the sign) and the loss."""
    scores = [number(numbers.get(f"{metric.name}_{key}")) for key in _COLUMNS]
    cells = [show_score(metric, value).removesuffix(" %") for value in scores]
    value = number(numbers.get("loss"))
    return [*cells, "–" if math.isnan(value) else f"{value:.4f}"] if loss else cells


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


def _page(run: Run, pictures: Mapping[str, Picture], others: Mapping[str, Run]) -> str:
    config, metrics = run.config, run.metrics
    method = method_labels.row(_setting(config, "algorithm"))
    title = f"{method} on {_setting(config, 'dataset')}"
    facts = [f"{_setting(config, 'partition')} partition", f"seed {_setting(config, 'seed')}"]
    facts[1:1] = [f"{_setting(config, key)} {key}" for key in ("clients", "rounds")]
    changed = method_labels.sentence(method_labels.changes(config, known_settings()))
    facts = [method_labels.label(config), *facts, changed]
    drawn = "\n".join(figure_block(pictures[name], name) for name in pictures)
    body = f"""{_warnings(run)}
{_headline(metrics, read_deviation(run.directory))}
{_answer(run, others)}
{_results(metrics)}
{_clients(run)}
{_learned(config, metrics)}
<section class="figures">
<h2>Figures</h2>
{drawn}
</section>
{_settings(config)}
{_origin(run)}"""
    return page(title, facts, body)


def _answer(run: Run, others: Mapping[str, Run]) -> str:
    """Whether the method helped, by the runs of Local and FedAvg that there are."""
    said = [references.sentence(run, name, other) for name, other in others.items()]
    if not said:
        if run.config.get("algorithm") in references.METHODS:
            return ""
        said = [
            "No finished run of Local or FedAvg on the same data, split, seed and network lies "
            "beside this one, so that it cannot be said. With the setting reference=true both "
            "are run, and it is said here."
        ]
    inside = "\n".join(f"<p>{html.escape(line)}</p>" for line in said)
    return f'<section class="answer">\n<h2>Did it help?</h2>\n{inside}\n</section>'


def _settings(config: Mapping[str, Any]) -> str:
    """Those that were changed first; the others are folded away."""
    usual = dict(flat(known_settings()))
    each = list(flat(config))
    changed = [(key, value) for key, value in each if usual.get(key) != value]
    rest = [(key, value) for key, value in each if usual.get(key) == value]
    return f"""{settings_block("Settings that were changed", changed)}
<details>
<summary>{len(rest)} settings at their defaults</summary>
{settings_list(rest)}
</details>"""


def _origin(run: Run) -> str:
    """The command, versions and date."""
    if not run.made:
        return ""
    inside = "\n".join(f"<p>{html.escape(f'{k}: {v}')}</p>" for k, v in run.made.items())
    return f'<section class="origin">\n<h2>Where it comes from</h2>\n{inside}\n</section>'


def _warnings(run: Run) -> str:
    last = run.metrics[-1]
    said = []
    if last.get("rejected"):
        said.append(f"Uploads rejected, not finite or too large: {last['rejected']:,}.")
    if last.get("dropped"):
        said.append(f"Times that a sampled client dropped out: {last['dropped']:,}.")
    if lost := max((last[stage].get("not_finite") or 0 for stage in _stages(last)), default=0):
        said.append(
            f"Clients whose final evaluation is not finite: {lost:,}; means are over the "
            f"{min(last[stage].get('clients') or 0 for stage in _stages(last)):,} others."
        )
    if untested := sum(row.get("test_examples") == 0 for row in run.clients if row.get("active")):
        said.append(f"Clients that train and have no test examples: {untested:,}.")
    said += [f"After round {last['round']}, {text}." for text in last.get("remarks", ())]
    return "\n".join(f'<p class="warning" role="note">{html.escape(text)}</p>' for text in said)


def _headline(metrics: Sequence[Record], deviation: float | None) -> str:
    """deviation: a regression's targets', where it is known."""
    metric = metric_of(metrics)
    last = metrics[-1]
    best = dict(_picked(metrics)).get(f"best, round {last.get('best_round')}")
    cards: list[tuple[str, str, list[str]]] = []
    for stage in _stages(last):
        beneath = [f"mean over {_clients_in(last[stage])}, round {last['round']}"]
        if best is not None and best.get(stage):
            value = show_score(metric, number(best[stage].get(f"{metric.name}_mean")))
            unbroken = value.replace(" ", "\N{NO-BREAK SPACE}")
            beneath.append(f"best round {best['round']}: {unbroken}")
        elif last.get("best_round") == last["round"]:
            beneath.append("also the best round")
        root = number(last[stage].get("rmse_mean"))
        if deviation is not None and not math.isnan(root):
            beneath.append(
                f"rmse {root:.3g}, which is {root / deviation:.2g} of the targets' deviation: who "
                "predicts their mean has 1"
            )
        value = show_score(metric, number(last[stage].get(f"{metric.name}_mean")))
        cards.append((f"{word(metric)} {drawing.STAGES[stage]}", value, beneath))
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


def _clients_in(numbers: Record) -> str:
    count = numbers.get("clients")
    return "clients" if count is None else f"{count:,} client{'s' * (count != 1)}"


def _results(metrics: Sequence[Record]) -> str:
    blocks: list[str] = []
    for metric in metrics_of(metrics):
        loss = not blocks
        rows = [
            (
                f"{title}<br><small>{drawing.STAGES[stage]}</small>",
                *_cells(record[stage], metric, loss),
            )
            for title, record in _picked(metrics)
            for stage in _stages(record)
        ]
        caption = f"{word(metric)}{in_unit(metric)} on the clients' test examples"
        caption += ", and the loss." if loss else "."
        heads = (*_COLUMNS.values(), *(["loss"] if loss else []))
        blocks.append(table_block(caption, heads, rows))
    known = metrics[-1].get("best_round") is not None
    note = "" if known else "<p>There is no best round, as it is chosen on validation examples.</p>"
    tables = "\n".join(blocks)
    return f"""<section>
<h2>Results</h2>
{tables}
{note}
</section>"""


def _clients(run: Run) -> str:
    """A row for each client, the worst first, or quantiles of many; folded away."""
    metric = metric_of(run.metrics)
    tested = [row for row in run.clients if row.get("test_examples")]
    if not tested:
        return ""
    stages = _stages(run.metrics[-1])
    if len(tested) > client_figures.MOST_POINTS:
        return _quantiles(tested, metric, stages)
    sign = 1 if metric.higher_is_better else -1

    def place(row: Mapping[str, Any]) -> tuple[bool, float]:
        """By the score; one that is not finite is worse than any."""
        score = number(row.get(f"before_{metric.name}"))
        return not math.isnan(score), sign * score

    in_order = sorted(tested, key=place)
    rows = [
        (
            html.escape(client_figures.client_name(row)),
            f"{row.get('train_examples') or 0:,}",
            f"{row['test_examples']:,}",
            *(without_sign(metric, number(row.get(f"{stage}_{metric.name}"))) for stage in stages),
        )
        for row in in_order[:_MOST_CLIENTS]
    ]
    left = len(tested) - len(rows)
    which = f"the {len(rows)} worst of {len(tested):,}" if left else f"all {len(rows)}"
    heads = ("to train", "to test", *(stage for stage in stages))
    caption = f"{word(metric)}{in_unit(metric)} of each client, the worst first"
    caption += "; clients.csv has all of them." if left else "."
    return _folded(which, table_block(caption, heads, rows))


def _quantiles(tested: Sequence[Mapping[str, Any]], metric: Metric, stages: Sequence[str]) -> str:
    """A row for each quantile of the clients' scores."""
    columns = [
        client_figures.quantiles(
            [number(row.get(f"{stage}_{metric.name}")) for row in tested], metric
        )
        for stage in stages
    ]
    rows = [
        (name, *(without_sign(metric, column[name]) for column in columns))
        for name in (columns[0] if columns else ())
    ]
    caption = (
        f"Quantiles of {spoken(metric)}{in_unit(metric)} over clients; clients.csv has each client."
    )
    return _folded(f"quantiles of {len(tested):,}", table_block(caption, stages, rows))


def _folded(which: str, table: str) -> str:
    return f"""<details class="clients">
<summary>Clients: {which}</summary>
{table}
</details>"""


def _learned(config: Mapping[str, Any], metrics: Sequence[Record]) -> str:
    """Returns a section on what the method's last diagnostics mean, or ""."""
    known = method_labels.diagnostics(config)
    said = diagnostics.explanations(known, metrics[-1].get("observed", {}))
    if not said:
        return ""
    return f"<section>\n<h2>What was learned</h2>\n<p>{html.escape(' '.join(said))}</p>\n</section>"


def _setting(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    return "?" if value is None else str(value)
