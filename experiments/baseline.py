"""Trains any method on any dataset and partition: the same as `fedjax-pfl baseline`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["baseline", *sys.argv[1:]])
