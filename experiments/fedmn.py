"""Trains FedMN or a method of its tables: the same as `fedjax-pfl fedmn`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["fedmn", *sys.argv[1:]])
