"""Train Factorized-FL or a method of its tables.

python -m experiments.factorized_fl                   beta on the embedded digits, labels permuted
python -m experiments.factorized_fl \
    --config=factorized_fl:cifar10-permuted-noniid-alpha
"""

from fedjax_pfl.cli.command import launch

if __name__ == "__main__":
    launch("factorized_fl")
