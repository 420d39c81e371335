"""Report of a run: figures, a self-contained HTML page and a text table.

Bytes, seconds and counts of an evaluation are totals since round 0.
"""

import functools
import html
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedjax_pfl.core import diagnostics
from fedjax_pfl.core.metrics import Metric
from fedjax_pfl.report import (
    answer,
    class_figures,
    client_figures,
    comparison,
    drawing,
    figures,
    html_page,
    method_labels,
    references,
    run_reader,
)
from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.html_page import table_block
from fedjax_pfl.report.numbers import (
    direction,
    format_bytes,
    format_score,
    format_score_without_percent,
    mean_score,
    metric_name,
    metric_of,
    metric_title,
    metrics_of,
    number,
    optional_parts,
    unit_suffix,
)
from fedjax_pfl.report.run_reader import Record, Run, default_settings, read_deviation

_MAX_CLIENTS = 50  # in a table
_RESULT_FIGURES = ("score_rounds", "score_bytes", "score_seconds", "train_loss")
_COLUMNS = {"mean": "mean", "weighted": "weighted", "std": "std", "worst10": "worst 10 %"}


def write(
    run: Run,
    extra_figures: Mapping[str, Figure] | None = None,
    reference_runs: Mapping[str, Run] | None = None,
) -> pathlib.Path:
    """Writes `figures/*.png` and `report.html` to a run's directory, and returns the page's path.

    Empty figures are left out, such as the traffic of a method that moves no bytes.

    Args:
      run: The run.
      extra_figures: More figures by file name. The caption is the figure's label
        (`figure.set_label`), or else the name.
      reference_runs: Finished runs with the same data, seed and network by label, in addition to
        those found in neighbouring directories.
    """
    directory = run.directory
    reference_runs = {**references.find(run), **(reference_runs or {})}
    curves = {
        name: comparison.curve(references.as_row(reference), metric_of(run.metrics))
        for name, reference in reference_runs.items()
    }
    class_names = run_reader.read_class_names(directory)
    candidates = {
        "answer": answer.draw(run, reference_runs),
        **figures.draw(run.metrics, run.clients, run.traffic, curves, held_out=run.on_held_out),
        "confusion": class_figures.draw(run.confusion, class_names),
    }
    pictures = {name: picture for name, picture in candidates.items() if picture is not None}
    for name, figure in (extra_figures or {}).items():
        title = re.sub(r"[\W_]+", " ", name).strip().capitalize()
        caption = str(figure.get_label()) or f"{title}."
        pictures[re.sub(r"[^\w.-]+", "_", name)] = Picture(figure, caption, caption)
    (directory / "figures").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        (directory / "figures" / f"{name}.png").write_bytes(html_page.png(picture.figure))

    # Atomic and last: the existence of report.html marks a finished run.
    part = directory / "report.html.part"
    part.write_text(_page(run, pictures, reference_runs), encoding="utf-8")
    return part.replace(directory / "report.html")


def table(metrics: Sequence[Record]) -> str:
    """Returns scores of the last and best round, bytes, seconds and dropouts as plain text."""
    rows: list[tuple[str, ...]] = []
    for metric in metrics_of(metrics):
        head = metric_name(metric) + (" (%)" if metric.unit == "%" else "")
        rows.append((head, "", *_COLUMNS.values(), *([] if rows else ["loss"])))
        with_loss = len(rows) == 1
        for title, record in _selected_rounds(metrics):
            for stage in _stages(record):
                rows.append((title, stage, *_cells(record[stage], metric, with_loss)))
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
    evaluating, saving = _time_clauses(last, "")
    lines += [
        f"bytes    {format_bytes(down)} down, {format_bytes(up)} up",
        f"seconds  {_seconds(last.get('seconds'))}{evaluating}, and "
        f"{_seconds(last.get('compile_seconds'))} to compile{saving}",
        f"clients  {last.get('dropped') or 0} dropped out, {last.get('rejected') or 0} rejected",
    ]
    lines += [f"{name:<7}  {', '.join(parts)}" for name, _, parts in optional_parts(last)]
    return "\n".join(lines)


def _selected_rounds(metrics: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """Yields (title, line of metrics.jsonl) for the last evaluation and any best round."""
    last = metrics[-1]
    best = last.get("best_round")
    if best == last["round"]:
        yield f"last and best, round {best}", last
        return
    yield f"last, round {last['round']}", last
    best_records = [record for record in metrics if record["round"] == best]
    if best_records:
        yield f"best, round {best}", best_records[-1]


def _stages(record: Record) -> list[str]:
    return [stage for stage in drawing.STAGES if record.get(stage)]


def _cells(numbers: Record, metric: Metric, with_loss: bool) -> list[str]:
    """Returns cells of text: statistics over clients of one score, and the loss if `with_loss`.

    `numbers` are the summary of one evaluation, before or after local training.
    """
    scores = [number(numbers.get(f"{metric.name}_{key}")) for key in _COLUMNS]
    cells = [format_score_without_percent(metric, value) for value in scores]
    value = number(numbers.get("loss"))
    return [*cells, "–" if math.isnan(value) else f"{value:.4f}"] if with_loss else cells


def _seconds(value: Any) -> str:
    seconds = number(value)
    return "–" if math.isnan(seconds) else f"{seconds:,.1f}"


def _time_clauses(last: Record, unit: str) -> tuple[str, str]:
    """Returns a clause on the seconds of evaluations and one on the seconds of checkpoints.

    Each is "" if not measured. `last` is the last line of metrics.jsonl; `unit` follows the number.
    """
    seconds = (last.get("evaluate_seconds"), last.get("checkpoint_seconds"))
    purposes = ("of them to evaluate", "for checkpoints")
    clauses = [
        "" if value is None else f", {_seconds(value)}{unit} {purpose}"
        for value, purpose in zip(seconds, purposes, strict=True)
    ]
    return clauses[0], clauses[1]


def _page(run: Run, pictures: Mapping[str, Picture], reference_runs: Mapping[str, Run]) -> str:
    """Returns the page as HTML."""
    config, metrics = run.config, run.metrics
    title = f"{method_labels.title(config)} on {_setting(config, 'dataset')}"
    facts = [f"{_setting(config, 'partition')} partition", f"seed {_setting(config, 'seed')}"]
    rounds = f"{metrics[-1]['round']} of {run.rounds}" if run.ended_early else run.rounds
    facts[1:1] = [f"{_setting(config, 'clients')} clients", f"{rounds} rounds"]
    changed = method_labels.sentence(method_labels.changes(config, default_settings()))
    facts = [method_labels.label(config), *facts, changed]
    remaining = dict(pictures)
    section = functools.partial(html_page.section_block, remaining)
    answer_section = answer.section(run, reference_runs, remaining.pop("answer", None))
    class_names = run_reader.read_class_names(run.directory)
    body = f"""{answer_section}
{_warnings(run)}
{_headline(metrics, read_deviation(run.directory))}
{section("Results", _results(metrics), _RESULT_FIGURES)}
{section("Clients", _clients(run), ("clients", "partition"))}
{section("Classes", _paragraph(class_figures.sentence(run.confusion, class_names)), ("confusion",))}
{section("Traffic", "", ("traffic",))}
{section("Method", _explanations(config, metrics), list(remaining))}
{_settings(config)}
{_provenance(run)}
{html_page.definitions()}"""
    return html_page.page(title, facts, body)


def _settings(config: Mapping[str, Any]) -> str:
    """Returns a collapsed HTML section: changed settings, then those at their defaults."""
    defaults = dict(html_page.flatten(default_settings()))
    settings = list(html_page.flatten(config))
    changed = [(key, value) for key, value in settings if defaults.get(key) != value]
    unchanged = [(key, value) for key, value in settings if defaults.get(key) == value]
    return f"""<details class="all-settings">
<summary>Settings: {len(changed)} changed, {len(unchanged)} at their defaults</summary>
{html_page.settings_block("Settings that were changed", changed)}
{html_page.settings_block("Settings at their defaults", unchanged)}
</details>"""


def _provenance(run: Run) -> str:
    """Returns an HTML section with a run's command, versions and date, "" if they are unknown."""
    if not run.provenance:
        return ""
    items = "\n".join(f"<p>{html.escape(f'{k}: {v}')}</p>" for k, v in run.provenance.items())
    return f'<section class="origin">\n<h2>Where it comes from</h2>\n{items}\n</section>'


def _warnings(run: Run) -> str:
    """Returns paragraphs (HTML) that warn of a run's problems, the method's remarks at the end."""
    last = run.metrics[-1]
    counted = {
        "rejected": "Uploads rejected, not finite or too large",
        "dropped": "Times that a sampled client dropped out",
        "attackers": "Attackers, left out of all means",
    }
    messages = [f"{text}: {last[name]:,}." for name, text in counted.items() if last.get(name)]
    if lost := max((last[stage].get("not_finite") or 0 for stage in _stages(last)), default=0):
        messages.append(
            f"Clients whose final evaluation is not finite: {lost:,}; means are over the "
            f"{min(last[stage].get('clients') or 0 for stage in _stages(last)):,} others."
        )
    for stage, success in (last.get("attack_success") or {}).items():
        share = "–" if math.isnan(number(success)) else f"{success:.1%}"
        messages.append(f"Success of the backdoor, {drawing.STAGES[stage]}: {share}.")
    if untested := sum(row.get("test_examples") == 0 for row in run.participants):
        messages.append(f"Clients that train and have no test examples: {untested:,}.")
    messages += [f"After round {last['round']}, {text}." for text in last.get("remarks", ())]
    return "\n".join(f'<p class="warning" role="note">{html.escape(text)}</p>' for text in messages)


def _headline(metrics: Sequence[Record], deviation: float | None) -> str:
    """Returns the main results at the top of the page as HTML: scores, bytes, times, dropouts.

    `deviation` is the standard deviation of a regression's targets, None if unknown.
    """
    metric = metric_of(metrics)
    last = metrics[-1]
    best = dict(_selected_rounds(metrics)).get(f"best, round {last.get('best_round')}")
    cards: list[tuple[str, str, str, list[str]]] = []  # title, defined term, value, notes
    for stage in _stages(last):
        notes = [f"mean over {_clients_in(last[stage])}, round {last['round']}"]
        if best is not None and best.get(stage):
            value = format_score(metric, mean_score(best, metric, stage))
            value_text = value.replace(" ", "\N{NO-BREAK SPACE}")
            notes.append(f"best round {best['round']}: {value_text}")
        elif last.get("best_round") == last["round"]:
            notes.append("also the best round")
        rmse = number(last[stage].get("rmse_mean"))
        if deviation is not None and not math.isnan(rmse):
            notes.append(
                f"rmse {rmse:.3g}, {rmse / deviation:.2g} of the targets' standard deviation, "
                "which is the rmse of predicting their mean"
            )
        value = format_score(metric, mean_score(last, metric, stage))
        cards.append((f"{metric_title(metric)} {drawing.STAGES[stage]}", stage, value, notes))
    down, up = number(last.get("bytes_down")), number(last.get("bytes_up"))
    directions = [f"{format_bytes(down)} down", f"{format_bytes(up)} up"]
    cards.append(("Bytes moved", "", format_bytes(down + up), directions))
    evaluating, saving = _time_clauses(last, " s")
    times = [f"and {_seconds(last.get('compile_seconds'))} s to compile{saving}"]
    if evaluating:
        times.insert(0, evaluating.removeprefix(", "))
    cards.append(("Time", "", f"{_seconds(last.get('seconds'))} s", times))
    counts = " / ".join(f"{last.get(key) or 0:,}" for key in ("dropped", "rejected"))
    cards.append(("Dropped out / rejected", "", counts, ["clients, over all rounds"]))
    cards += [(title, "", parts[0], parts[1:]) for _, title, parts in optional_parts(last)]
    items = "\n".join(
        f"<div><dt>{html_page.with_definition(head, term)}</dt>"
        + f"<dd><strong>{html.escape(value)}</strong>"
        + "".join(f"<span>{html.escape(line)}</span>" for line in notes)
        + "</dd></div>"
        for head, term, value, notes in cards
    )
    return f'<dl class="cards">\n{items}\n</dl>'


def _clients_in(numbers: Record) -> str:
    count = numbers.get("clients")
    return "clients" if count is None else f"{count:,} client{'s' * (count != 1)}"


def _results(metrics: Sequence[Record]) -> str:
    """Returns a table of scores per metric as HTML: last and best round, before and after."""
    blocks: list[str] = []
    for metric in metrics_of(metrics):
        with_loss = not blocks
        rows = [
            (
                f"{title}<br><small>{drawing.STAGES[stage]}</small>",
                *_cells(record[stage], metric, with_loss),
            )
            for title, record in _selected_rounds(metrics)
            for stage in _stages(record)
        ]
        caption = f"{metric_title(metric)}{unit_suffix(metric)} on the clients' test examples"
        caption += ", and the loss." if with_loss else "."
        heads = (*_COLUMNS.values(), *(["loss"] if with_loss else []))
        blocks.append(table_block(caption, heads, rows))
    last, reason = metrics[-1], "it is chosen on validation examples"
    if any(m.get("validation") for m in metrics if m.get("phase") == last.get("phase")):
        reason = "no evaluation of the last phase has finite validation scores of all clients"
    note = f"<p>There is no best round, as {reason}.</p>" if last.get("best_round") is None else ""
    return "\n".join([*blocks, note])


def _clients(run: Run) -> str:
    """Returns a collapsed HTML table: the 50 worst clients, or quantiles for over 1,000 clients."""
    metric = metric_of(run.metrics)
    tested = [row for row in run.clients if row.get("test_examples")]
    if not tested:
        return ""
    stages = _stages(run.metrics[-1])
    if len(tested) > client_figures.MAX_POINTS:
        honest = [row for row in tested if not row.get("attacker")]  # as in all means
        return _quantiles(honest, metric, stages)

    def score(row: Mapping[str, Any], stage: str) -> float:
        return number(row.get(f"{stage}_{metric.name}"))

    scores = ((score(row, "before"), row) for row in tested)
    # Scores that are not finite come first.
    in_order = [
        row for _, row in sorted(scores, key=lambda s: (s[0] == s[0], direction(metric) * s[0]))
    ]
    rows = [
        (
            html.escape(client_figures.client_name(row)) + ", attacker" * bool(row.get("attacker")),
            f"{row.get('train_examples') or 0:,}",
            f"{row['test_examples']:,}",
            *(format_score_without_percent(metric, score(row, stage)) for stage in stages),
        )
        for row in in_order[:_MAX_CLIENTS]
    ]
    is_partial = len(tested) > len(rows)
    summary = f"the {len(rows)} worst of {len(tested):,}" if is_partial else f"all {len(rows)}"
    heads = ("to train", "to test", *stages)
    caption = f"{metric_title(metric)}{unit_suffix(metric)} of each client, the worst first"
    caption += "; clients.csv has all of them." if is_partial else "."
    return _collapsed(summary, table_block(caption, heads, rows))


def _quantiles(tested: Sequence[Mapping[str, Any]], metric: Metric, stages: Sequence[str]) -> str:
    """Returns a collapsed HTML table of quantiles of scores over `tested`, rows of clients.csv."""
    columns = [
        client_figures.quantiles(
            [number(row.get(f"{stage}_{metric.name}")) for row in tested], metric
        )
        for stage in stages
    ]
    rows = [
        (name, *(format_score_without_percent(metric, column[name]) for column in columns))
        for name in (columns[0] if columns else ())
    ]
    caption = (
        f"Quantiles of {metric_name(metric)}{unit_suffix(metric)} over clients; clients.csv has "
        "each client."
    )
    return _collapsed(f"quantiles of {len(tested):,}", table_block(caption, stages, rows))


def _collapsed(summary: str, table: str) -> str:
    """Returns an HTML <details> element, closed at first: `summary` and `table`, both HTML."""
    return f"""<details class="clients">
<summary>Clients: {summary}</summary>
{table}
</details>"""


def _explanations(config: Mapping[str, Any], metrics: Sequence[Record]) -> str:
    """Returns an HTML paragraph that explains the method's last diagnostics, or "" without any."""
    known_diagnostics = method_labels.diagnostics(config)
    sentences = diagnostics.explanations(known_diagnostics, metrics[-1].get("diagnostics", {}))
    if not sentences:
        return ""
    return _paragraph(" ".join(sentences))


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>" if text else ""


def _setting(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    return "?" if value is None else str(value)
