"""Trains in several processes through Flower: the same as `fedjax-pfl deploy`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["deploy", *sys.argv[1:]])
