"""What is imported only when it is used, because it takes longer than all the rest."""

import os
import subprocess
import sys

from fedjax_pfl.simulation.devices import cores

NAMED = ("flax.nnx",)
LATER = ("matplotlib", "orbax", "scipy", "sklearn", "tensorflow_datasets", "tensorboardX", "PIL")
PROGRAM = f"""
import sys
import jax, jax.numpy
before = set(sys.modules)
import fedjax_pfl
fedjax_pfl.run, fedjax_pfl.run_all, fedjax_pfl.arrays
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new & set({LATER!r})) + [name for name in {NAMED!r} if name in sys.modules])
"""


def test_importing_the_library_does_not_start_the_backend():
    """The number of CPU devices, and the processes of a run, can only be set before that."""
    program = (
        "import fedjax_pfl, fedjax_pfl.cli.main, fedjax_pfl.cli.train\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_the_library_comes_without_what_draws_and_saves():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_importing_the_library_does_not_start_jax():
    """Or it would be too late to make every core a device."""
    program = (
        "import fedjax_pfl, jax; fedjax_pfl.prepare_devices(); print(jax.local_device_count())"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (0, f"{cores()}\n"), done.stderr
