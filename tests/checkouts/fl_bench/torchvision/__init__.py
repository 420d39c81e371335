import types

datasets = types.SimpleNamespace()
