"""Folder of the Flower app that the server runs and sends to the nodes."""

from pathlib import Path

APP_FOLDER = Path(__file__).parent
