"""Train pFedHN, pFedHN-PC or a method of their tables.

python -m experiments.pfedhn                          on the embedded digits
python -m experiments.pfedhn --config=pfedhn:cifar10-n50
"""

from fedjax_pfl.cli.command import launch

if __name__ == "__main__":
    launch("pfedhn")
