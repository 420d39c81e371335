"""The command fedjax-pfl compare."""

from pathlib import Path

from absl import flags

from fedjax_pfl.cli.command import Call, Command
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison
from fedjax_pfl.report.comparison_page import FORMATS, write

HELP = """
fedjax-pfl compare RUN RUN ...                  prints two tables
fedjax-pfl compare RUN RUN ... --format=latex   as text, markdown, latex or csv
fedjax-pfl compare RUN RUN ... --out=FOLDER     writes a page, tables and figures

FOLDER gets compare.html, compare.csv with unrounded numbers, each table as CSV, Markdown and LaTeX
in tables/, and the curves as PDF and PNG in figures/. LaTeX needs the package booktabs and prints
the best value of a column in bold. Values are compared as printed, without their deviation: ties
are all bold.

A RUN is a run directory, or the folder of a sweep, which stands for all its runs. Runs that differ
only in the seed are one row. The test is Wilcoxon's signed-rank test, two-sided, of each row
against the first. It pairs clients, each with its mean over seeds. p is not corrected for the
number of rows.
"""


def define_flags(options: flags.FlagValues) -> None:
    """Adds the flags --out and --format to `options`."""
    flags.DEFINE_string(
        "out", None, "Folder for the page, tables and figures.", flag_values=options
    )
    flags.DEFINE_enum(
        "format", "text", list(FORMATS), "Format of the printed tables.", flag_values=options
    )


def run_directories(path: Path) -> list[Path]:
    """Returns [path] for a run directory, or the run directories in the folder of a sweep."""
    if (path / "config.json").is_file():
        return [path]
    return sorted(config.parent for config in path.glob("*/config.json")) or [path]


def compare(call: Call) -> None:
    """Compares the runs in `call.positional`; prints tables in --format, writes a page to --out."""
    if not call.positional:
        raise UsageError("name one run directory or more, such as runs/pfedla")
    directories = [path for word in call.positional for path in run_directories(Path(word))]
    rows = comparison.group([comparison.read(path) for path in directories])
    page = None if call.options.out is None else write(rows, Path(call.options.out))
    print(FORMATS[call.options.format](rows))
    if page is not None and call.options.format == "text":  # programs read the other formats
        print(f"\nPage: {page}")


COMMANDS = {"compare": Command(lambda: HELP, define_flags, compare)}
