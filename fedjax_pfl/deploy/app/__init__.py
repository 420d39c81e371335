"""What Flower sends to the nodes and runs: the folder of a Flower app."""

from pathlib import Path

HERE = Path(__file__).parent
