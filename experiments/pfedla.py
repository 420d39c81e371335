"""Trains pFedLA, HeurpFedLA or a method of their tables: the same as `fedjax-pfl pfedla`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["pfedla", *sys.argv[1:]])
