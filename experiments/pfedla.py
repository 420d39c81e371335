"""Train pFedLA, HeurpFedLA or a method of their tables.

python -m experiments.pfedla                          on the embedded digits
python -m experiments.pfedla --config=pfedla:cifar10-classes4-n10-k1
"""

from fedjax_pfl.cli.command import launch

if __name__ == "__main__":
    launch("pfedla")
