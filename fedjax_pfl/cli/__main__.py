"""Runs `python -m fedjax_pfl.cli COMMAND`, the same as `fedjax-pfl COMMAND`."""

from fedjax_pfl.cli.main import main

main()
