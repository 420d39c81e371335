"""Trains pFedHN, pFedHN-PC or a method of their tables: the same as `fedjax-pfl pfedhn`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["pfedhn", *sys.argv[1:]])
