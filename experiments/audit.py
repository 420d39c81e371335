"""Measures what a curious server learns from a run: the same as `fedjax-pfl audit`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["audit", *sys.argv[1:]])
