"""Train FedMN or a method of its tables.

python -m experiments.fedmn                          on the embedded digits
python -m experiments.fedmn --config=fedmn:cifar10
"""

from fedjax_pfl.cli.command import launch

if __name__ == "__main__":
    launch("fedmn")
