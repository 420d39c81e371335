"""Draws the picture of the README: a report next to the benchmark.

    python docs/first_picture.py REPORT

REPORT is the report.html of `python -m experiments.pfedla --config.reference=true`, the run of
`make demo` with reference runs. Requires the browser chromium.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
BENCHMARK = DOCS.parent / "experiments" / "results" / "benchmark-cpu.png"
WIDTH, HEIGHT, MARGIN = 1600, 720, 24
QUIET = "--disable-background-networking --disable-component-update --disable-sync --disable-gpu"


def screenshot(report: Path, file: Path) -> Image.Image:
    """Returns an image of the top of a report."""
    flags = f"--headless --no-sandbox --no-first-run --hide-scrollbars {QUIET}".split()
    size = ["--window-size=1100,940", f"--screenshot={file}"]
    subprocess.run(
        ["chromium", *flags, *size, report.resolve().as_uri()],
        check=True,
        timeout=120,
        stderr=subprocess.DEVNULL,
    )
    return Image.open(file).convert("RGB")


def main(report: Path) -> None:
    """Writes docs/first_picture.png."""
    with tempfile.TemporaryDirectory() as folder:
        left = screenshot(report, Path(folder, "report.png"))
    right = Image.open(BENCHMARK).convert("RGB")
    page = Image.new("RGB", (WIDTH, HEIGHT), "white")
    left = left.resize((HEIGHT * left.width // left.height, HEIGHT), Image.Resampling.LANCZOS)
    page.paste(left, (0, 0))
    room = WIDTH - left.width - 2 * MARGIN
    right = right.resize((room, room * right.height // right.width), Image.Resampling.LANCZOS)
    page.paste(right, (left.width + MARGIN, (HEIGHT - right.height) // 2))
    page.save(DOCS / "first_picture.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
