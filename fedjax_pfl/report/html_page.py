"""Self-contained HTML pages: frame, blocks, and figures that adapt to dark mode."""

import html
import io
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from fedjax_pfl.report.drawing import Picture
from fedjax_pfl.report.text_tables import LINE

# Colours of figures on white, and the variables of the page's style that replace them.
_COLOURS = {
    "#333333": "--ink",
    "#000000": "--ink",
    "#262626": "--ink",
    "#999999": "--soft",
    "#dddddd": "--faint",
    "#ebebeb": "--faint",
    "#0072b2": "--blue",
    "#d55e00": "--red",
    "#2f6690": "--deep",
    "#b23a48": "--novel",
    "#009e73": "--green",
    "#666666": "--gray",
    "#ffffff": "--paper",
}

_LONG = 16  # characters; longer cells may wrap


def png(figure: Figure) -> bytes:
    """Returns a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    return buffer.getvalue()


def pdf(figure: Figure) -> bytes:
    """Returns a figure as a reproducible PDF file with embedded TrueType fonts."""
    buffer = io.BytesIO()
    with mpl.rc_context({"pdf.fonttype": 42}):  # journals refuse Type 3 fonts
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None}, facecolor="white")
    return buffer.getvalue()


def svg_file(figure: Figure, name: str) -> str:
    """Returns the text of a reproducible SVG file on white; the ids in it are made from `name`."""
    return _svg(figure, name, facecolor="white")


def _svg(figure: Figure, name: str, **options: Any) -> str:
    """Returns the text of an SVG file; `options` as for `Figure.savefig`."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, **options)
    return buffer.getvalue()


def svg(figure: Figure, name: str) -> str:
    """Returns a figure as an HTML <svg> element; its ids start with `name`, unique on the page.

    Colours are CSS variables of the page, which adapt to dark mode.
    """
    text = _svg(figure, name, transparent=True)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg[^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1">', text)
    text = text.replace("xlink:href", "href")
    prefix = re.sub(r"\W", "_", name)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for colour, variable in _COLOURS.items():
        text = re.sub(rf"{colour}\b", f"var({variable})", text, flags=re.IGNORECASE)
    return text.strip()


DEFINITIONS = {
    "before": "the model as the client is served it, before local training",
    "after": "the same model after one more local training on the client's training examples",
    "mean": "over clients; every client counts the same",
    "weighted": "mean over clients, weighted by their numbers of test examples",
    "std": "standard deviation over clients",
    "worst 10 %": "mean over the tenth of the clients with the worst scores",
    "Bytes moved": "payload that clients download (down) and upload (up); 1 kB is 1,000 bytes",
}


def with_definition(text: str, term: str = "") -> str:
    """Returns a text as HTML that shows the definition of a term (default: the text) on hover.

    A term that is no key of DEFINITIONS has none.
    """
    definition, text = DEFINITIONS.get(term or text), html.escape(text)
    return f'<abbr title="{html.escape(definition)}">{text}</abbr>' if definition else text


def definitions() -> str:
    """Returns a footnote with all terms of DEFINITIONS and their meanings as HTML."""
    text = "; ".join(f"<b>{html.escape(t)}</b>: {html.escape(d)}" for t, d in DEFINITIONS.items())
    return f'<p class="footnote">{text}.</p>'


def page(title: str, facts: Sequence[str], body: str) -> str:
    """Returns a complete HTML document, with style and without links to other files.

    `title` and the `facts` for the line below it are text; `body` is HTML. Bytes of a file's name
    that are no UTF-8 become escapes such as \\udcff, because a page cannot hold them.
    """
    content = f"""<!doctype html>
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
    return content.encode("utf-8", "backslashreplace").decode("utf-8")


def table_block(
    caption: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    variants: Sequence[Sequence[str]] = (),
) -> str:
    """Returns a table as HTML.

    `heads` has the heads of all columns except the first. The first cell of a row is its head, as
    HTML, the others are text. `variants` are rows of this library's variants of methods, below a
    line.
    """
    columns = "".join(f'<th scope="col">{with_definition(text)}</th>' for text in heads)

    def part(rows: Sequence[Sequence[str]]) -> str:
        """Returns table rows as HTML."""
        return "\n".join(
            f'<tr><th scope="row">{head}</th>'
            + "".join(
                f'<td{_long(cell)} data-head="{html.escape(column)}">{html.escape(cell)}</td>'
                for column, cell in zip(heads, cells, strict=True)
            )
            + "</tr>"
            for head, *cells in rows
        )

    line = f'<tr><th colspan="{len(heads) + 1}" scope="rowgroup">{LINE}</th></tr>'
    below = f"\n<tbody>\n{line}\n{part(variants)}\n</tbody>" if variants else ""
    return f"""<div class="wide"><table>
<caption>{html.escape(caption)}</caption>
<thead><tr><td></td>{columns}</tr></thead>
<tbody>
{part(rows)}
</tbody>{below}
</table></div>"""


def _long(cell: str) -> str:
    """Returns the class attribute of a cell that may wrap, or ""."""
    return ' class="long"' if len(cell) > _LONG else ""


def settings_list(settings: Iterable[tuple[str, str]]) -> str:
    """Returns settings, pairs of dotted name and value, as an HTML list."""
    items = "\n".join(
        f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>"
        for key, value in settings
    )
    return f'<dl class="settings">\n{items}\n</dl>'


def settings_block(title: str, settings: Iterable[tuple[str, str]]) -> str:
    """Returns an HTML section: a title (text), then settings, pairs of dotted name and value."""
    return section(html.escape(title), settings_list(settings))


def section(title: str, *blocks: str) -> str:
    """Returns an HTML section with a title and blocks, all HTML."""
    return "\n".join(["<section>", f"<h2>{title}</h2>", *blocks, "</section>"])


def breakable(label: str, width: int) -> str:
    """Returns a label as HTML with line breaks, at most `width` characters in a line."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(label, width))


def figure_block(picture: Picture, name: str) -> str:
    """Returns a <figure> with SVG and caption; `name`, unique on the page, starts its ids."""
    width, height = picture.figure.get_size_inches()
    # Several panels in a row need the width of the page.
    is_wide = len(picture.figure.axes) > 2 and width > 2 * height
    broad = ' class="broad"' if is_wide else ""
    element = svg(picture.figure, name).replace(
        "<svg", f'<svg role="img" aria-label="{html.escape(picture.alt)}"', 1
    )
    caption = html.escape(picture.caption)
    # Without a script: the page needs none to work from a file.
    toggle = '<input type="checkbox" aria-label="Enlarge the figure">'
    return (
        f"<figure{broad}><label>{toggle}{element}</label>"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def section_block(pictures: dict[str, Picture], title: str, text: str, names: Sequence[str]) -> str:
    """Returns a section with a title, HTML and figures, or "" if it has neither HTML nor figures.

    `title` and `text`, above the figures, are HTML. The figures of these names, so far as they
    exist, are removed from `pictures`.
    """
    blocks = [figure_block(pictures.pop(name), name) for name in names if name in pictures]
    if not text and not blocks:
        return ""
    grid = '<div class="figures">\n{}\n</div>'.format("\n".join(blocks)) if blocks else ""
    return section(title, text, grid)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted name, value as text) of all settings, sub-configs last.

    A string is its own text, another value is JSON. `prefix` goes before each name.
    """
    for key, value in sorted(config.items(), key=lambda item: (_is_group(item[1]), item[0])):
        if _is_group(value):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{prefix}{key}", text


def _is_group(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


_CSS = """
:root { --ink: #1f2328; --soft: #59636e; --paper: #ffffff; --card: #f6f8fa; --line: #d1d9e0;
  --warn: #7d4e00; --warned: #fff8e0; --faint: #dddddd; --blue: #0072b2; --red: #d55e00;
  --deep: #2f6690; --novel: #b23a48; --green: #00795a; --gray: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa4af; --paper: #15191e; --card: #20262d; --line: #3a424c;
    --warn: #f2cc60; --warned: #33290f; --faint: #30373f; --blue: #4aa8de; --red: #f2894a;
    --deep: #6fa8d0; --novel: #ee8a94; --green: #2fc79a; --gray: #aab3bd; }
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
th:first-child { text-align: left; padding-left: 0; white-space: normal; min-width: 7rem; }
.long { white-space: normal; overflow-wrap: anywhere; min-width: 14rem; font-size: .85em; }
th small, thead th { font-weight: normal; color: var(--soft); }
.figures { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; }
.broad { grid-column: 1 / -1; }
figure svg { display: block; width: 100%; height: auto; padding: 1.3rem .5rem .5rem;
  color: var(--ink); border: 1px solid var(--line); border-radius: .5rem; }
figure svg text { fill: currentColor; }
figure label { display: block; position: relative; cursor: zoom-in; }
figure input { position: absolute; inset: 0; margin: 0; appearance: none; cursor: inherit;
  border-radius: .5rem; }
figure input::after { content: "enlarge"; position: absolute; top: .2rem; right: .6rem;
  font-size: .8rem; color: var(--soft); background: var(--paper); padding: 0 .3rem; }
figure:has(input:checked) { position: fixed; inset: 0; z-index: 1; overflow: auto; margin: 0;
  max-width: none; padding: 1rem; background: var(--paper); }
figure:has(input:checked) label { cursor: zoom-out; }
figure:has(input:checked) svg { min-width: 45rem; margin: 0 auto; border: 0;
  max-width: max(62rem, 1.7 * (100vh - 7rem)); } /* all of a picture, or a tall one to scroll */
figure input:checked::after { content: "close"; }
abbr { text-decoration: underline dotted; text-underline-offset: .2em; cursor: help; }
.footnote { margin-top: 2rem; color: var(--soft); font-size: .85rem; }
.footnote b { font-weight: 600; }
.answer { margin: 1rem 0; padding: .2rem .9rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .5rem; }
.answer h2 { margin: .6rem 0 .2rem; }
.origin p { margin: .2rem 0; font-size: .88rem; overflow-wrap: anywhere; }
.answer p { margin: .4rem 0; }
.answer figure { max-width: 44rem; margin: .8rem 0; }
details summary { cursor: pointer; color: var(--soft); margin: 1rem 0 .4rem; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .4rem; }
.settings { display: grid; gap: 0 2rem; margin: 0; font-size: .88rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); }
.settings div { display: flex; justify-content: space-between; gap: 1rem; padding: .2rem 0;
  border-bottom: 1px solid var(--line); break-inside: avoid; }
.settings dd { text-align: right; overflow-wrap: anywhere; min-width: 4rem;
  font-family: ui-monospace, monospace; }
@media (max-width: 34rem) {
  /* A row is a block: its head, and under it the numbers with their names. */
  thead { display: none; }
  tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.6rem, 1fr));
    padding: .4rem 0; border-bottom: 1px solid var(--line); }
  th:first-child { grid-column: 1 / -1; white-space: normal; overflow-wrap: anywhere; }
  th, td { display: block; padding: .1rem 0; border: 0; text-align: left; }
  td { white-space: normal; overflow-wrap: anywhere; font-size: .9rem; }
  .long { grid-column: 1 / -1; }
  td::before { content: attr(data-head); display: block; color: var(--soft); font-size: .75rem; }
  .settings { grid-template-columns: 1fr; }
  figure { overflow-x: auto; } /* or its text would be too small to read */
  figure svg { min-width: 30rem; }
  figcaption { position: sticky; left: 0; }
}
@media print {
  :root { --ink: #000000; --soft: #444444; --paper: #ffffff; --card: #ffffff; --line: #bbbbbb;
    --warn: #000000; --warned: #ffffff; --faint: #dddddd; --blue: #0072b2; --red: #d55e00;
    --deep: #2f6690; --novel: #b23a48; --green: #00795a; --gray: #59636e; }
  main { max-width: none; padding: 0; }
  .wide { overflow: visible; font-size: .8rem; }
  th, td { padding: .2rem .4rem; }
  tr { break-inside: avoid; }
  figure, .cards div, .warning { break-inside: avoid; }
  figure input { display: none; }
  figure:has(input:checked) { position: static; }
  figure:has(input:checked) svg { min-width: 0; }
  abbr { text-decoration: none; }
  h2 { break-after: avoid; }
}
"""
