"""Importing the library starts no backend and loads no slow package."""

import json
import os
import subprocess
import sys

from fedjax_pfl.simulation.devices import cores

SLOW = ("matplotlib", "orbax", "scipy", "sklearn", "tensorflow_datasets", "PIL")
SLOW += ("tensorboardX", "wandb", "mlflow")
PROGRAM = f"""
import json, sys
import jax, jax.numpy
from jax._src import xla_bridge
before = set(sys.modules)
import fedjax_pfl
fedjax_pfl.run, fedjax_pfl.run_all, fedjax_pfl.arrays
names = {{name.partition(".")[0] for name in set(sys.modules) - before}}
slow = sorted(names & set({SLOW!r})) + ["flax.nnx"] * ("flax.nnx" in sys.modules)
import fedjax_pfl.cli.main, fedjax_pfl.cli.train
started = xla_bridge.backends_are_initialized()
fedjax_pfl.prepare_devices()
print(json.dumps([slow, started, jax.local_device_count()]))
"""


def test_an_import_loads_no_slow_package_and_leaves_the_devices_to_be_set():
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == [[], False, cores()]
