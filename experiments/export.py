"""Writes personal models to files: the same as `fedjax-pfl export`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
