"""What a node runs for each message in place of the code that the server sends with it."""

from pathlib import Path

HERE = Path(__file__).parent
