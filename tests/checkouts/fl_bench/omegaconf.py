"""Stand-in for OmegaConf: reads nested settings from JSON."""

import json
from pathlib import Path


class DictConfig(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class OmegaConf:
    @staticmethod
    def load(path):
        return json.loads(Path(path).read_text(), object_hook=DictConfig)
