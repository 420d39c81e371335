"""Runs a study of one of the four papers or of many methods, draws it and writes its numbers.

python -m experiments.studies pfedla            the studies of pFedLA
python -m experiments.studies pfedla figure6    one of them; --help shows the flags
"""

import importlib
import sys

from experiments.papers import study
from fedjax_pfl.cli.errors import ending
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings import configuration

SYSTEMS = ("pfedla", "pfedhn", "fedmn", "factorized_fl")
NAMES = (*SYSTEMS, "methods")  # `methods` belongs to no paper


def main() -> None:
    """Runs the command line of the system that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    with ending():
        if name.lstrip("-").startswith("help") or not name:
            print(f"{(__doc__ or '').strip()}\n\nSystems: {', '.join(NAMES)}")
            return
        if name not in NAMES:
            raise UsageError(f"there is no system {name!r}{configuration.suggestion(name, NAMES)}")
    del sys.argv[1]
    studies = importlib.import_module(f"experiments.papers.{name}.studies")
    study.launch(studies.STUDIES, studies.__doc__, name, studies.OPTIONS)


if __name__ == "__main__":
    main()
