"""Converts partitions of PFLlib and FL-bench: the same as `fedjax-pfl import-partition`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["import-partition", *sys.argv[1:]])
