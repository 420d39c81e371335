"""Chooses settings on validation examples: the same as `fedjax-pfl tune`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])
