"""Compares runs: the same as `fedjax-pfl compare`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["compare", *sys.argv[1:]])
