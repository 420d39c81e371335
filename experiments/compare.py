"""Runs side by side: means over seeds, paired tests, curves.

python -m experiments.compare RUN RUN ...                  prints two tables
python -m experiments.compare RUN RUN ... --format=latex   in text, markdown, latex or csv
python -m experiments.compare RUN RUN ... --out=FOLDER     and writes them in all formats, with
                                                           compare.png and compare.html

Each RUN is a run directory, or the folder of a sweep with all its runs. Runs that differ in their
seed only are one row. The test is Wilcoxon's signed-rank test, two-sided, of each row against the
first: a pair is a client, with its mean over seeds. p is not corrected for the number of rows.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from fedjax_pfl.cli.command import command
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import comparison
from fedjax_pfl.report.comparison_page import FORMATS, write


def runs_in(path: Path) -> list[Path]:
    """A run directory, or those in the folder of a sweep, in which there are other things too."""
    if (path / "config.json").is_file():
        return [path]
    return sorted(one.parent for one in path.glob("*/config.json")) or [path]


def main(argv: Sequence[str]) -> None:
    """Read, print, write."""
    if len(argv) < 2:
        raise UsageError("name one run directory or more, such as runs/pfedla")
    found = [path for word in argv[1:] for path in runs_in(Path(word))]
    rows = comparison.group([comparison.read(path) for path in found])
    chosen = flags.FLAGS
    page = None if chosen.out is None else write(rows, Path(chosen.out))
    print(FORMATS[chosen.format][0](rows))
    if page is not None and chosen.format == "text":  # other formats are for programs to read
        print(f"\nPage: {page}")


if __name__ == "__main__":
    # Here, because other commands have an --out of their own.
    flags.DEFINE_string("out", None, "Folder for tables, compare.png and compare.html.")
    flags.DEFINE_enum("format", "text", list(FORMATS), "Of the tables that are printed.")
    command(main)
