"""Train a method that needs no system of its own.

python -m experiments.baseline --config=baseline:fedavg-digits
"""

from fedjax_pfl.cli.command import launch

if __name__ == "__main__":
    launch("baseline")
