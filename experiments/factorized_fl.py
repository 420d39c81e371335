"""Trains Factorized-FL or a method of its tables: the same as `fedjax-pfl factorized_fl`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["factorized_fl", *sys.argv[1:]])
