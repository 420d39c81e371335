"""Train pFedLA, HeurpFedLA or a method of their tables.

python -m experiments.pfedla                          on the embedded digits
python -m experiments.pfedla --config=pfedla:cifar10-classes4-n10-k1
"""

from experiments.launch import launch

if __name__ == "__main__":
    launch("pfedla")
