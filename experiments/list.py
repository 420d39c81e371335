"""Lists settings, methods, datasets and presets: the same as `fedjax-pfl list`."""

import sys

from fedjax_pfl.cli.main import main

if __name__ == "__main__":
    main(["list", *sys.argv[1:]])
