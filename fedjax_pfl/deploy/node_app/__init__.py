"""Code that a node runs for each message, instead of the code that the server sends."""

from pathlib import Path

FOLDER = Path(__file__).parent
