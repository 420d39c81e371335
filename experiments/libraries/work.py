"""Workloads of the benchmark, as programs of this library, and facts about the machine."""

import contextlib
import ctypes
import gc
import math
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from fedjax_pfl.core import trees
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.presets import factorized_fl, fedmn, pfedhn, pfedla
from fedjax_pfl.runs import sweep_settings
from fedjax_pfl.runs.build import build
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import execution_plan
from fedjax_pfl.simulation.devices import cores
from fedjax_pfl.simulation.on_device import DeviceProgram

SHAPE = (32, 32, 3)
_SIDE = {"cpu": 2048}  # side of the matrices that measure the peak, by backend
_LARGE = 8192  # on other backends


class Work(NamedTuple):
    """A workload: rounds of an algorithm on 32x32x3 images with ten classes."""

    about: str
    network: str = "lenet"
    clients: int = 10
    cohort: int = 10
    examples: int = 640  # of each client
    epochs: int = 1
    local_steps: int | None = None  # instead of epochs
    batch: int = 32
    rate: float = 0.01
    rounds: int = 1
    seeds: int = 1  # in one program
    algorithm: str = "fedavg"
    settings: Mapping[str, Any] = {}  # other settings of this library

    @property
    def client_steps(self) -> int:
        """Total gradient steps of all clients."""
        steps = self.local_steps or self.epochs * -(-self.examples // self.batch)
        return self.seeds * self.rounds * self.cohort * steps

    def spec(self, parameters: int) -> dict[str, Any]:
        """Returns the description of the work for a rival."""
        fields = {name: value for name, value in self._asdict().items() if name != "settings"}
        return {**fields, "client_steps": self.client_steps, "parameters": parameters}


_HYPER = {"momentum": 0.9, "weight_decay": 5e-5, "clip_norm": 50.0}
WORKS = {
    "lenet-10": Work("LeNet, 10 clients x 20 steps x 32"),
    "lenet-100": Work(
        "LeNet, 100 clients x 20 steps x 32", clients=100, cohort=100, examples=320, epochs=2
    ),
    "lenet-1000": Work(
        "LeNet, 1,000 clients x 20 steps x 32", clients=1000, cohort=1000, examples=64, epochs=10
    ),
    "mlp": Work("MLP of 200, 10 clients x 20 steps x 32", network="mlp"),
    "resnet9": Work(
        "ResNet9, 4 clients x 2 steps x 32", network="resnet9", clients=4, cohort=4, examples=64
    ),
    "pfedla": Work(
        "pFedLA on LeNet, a round of 10 clients x 20 steps x 32",
        algorithm="pfedla",
    ),
    "pfedla-100": Work(
        "pFedLA on LeNet, a round of 100 clients x 20 steps x 32",
        clients=100,
        cohort=100,
        examples=64,
        epochs=10,
        algorithm="pfedla",
    ),
    "pfedla-500": Work(
        "pFedLA on LeNet, a round of 500 clients x 20 steps x 32",
        clients=500,
        cohort=500,
        examples=64,
        epochs=10,
        algorithm="pfedla",
    ),
    "pfedla-1000": Work(
        "pFedLA on LeNet, a round of 1,000 clients x 20 steps x 32",
        clients=1000,
        cohort=1000,
        examples=64,
        epochs=10,
        algorithm="pfedla",
    ),
    "seeds-8": Work("LeNet, 10 clients x 20 steps x 32, eight seeds at once", seeds=8),
    "pfedhn": Work(
        "pFedHN on LeNet, 50 steps of one of 50 clients x 50 steps x 64",
        clients=50,
        cohort=1,
        examples=800,
        local_steps=50,
        batch=64,
        rate=5e-3,
        rounds=50,
        algorithm="pfedhn",
        settings=_HYPER,
    ),
    "simulation": Work(
        "conv32-conv64-128, a round of 50 of 1,000 users x 50 images x 10",
        clients=1000,
        cohort=50,
        examples=50,
        batch=10,
        rate=0.1,
        network="dropout_cnn",
    ),
}


class Workload(NamedTuple):
    """A compiled workload."""

    run: Callable[[], None]  # runs the next rounds
    compile_seconds: float
    parameters: int
    flops: float  # of one client step, by formula
    plan: str
    program: Callable[[], str]  # returns the compiled program as HLO text


def configured(work: Work) -> ConfigDict:
    """Returns a workload as settings of this library."""
    return configuration.complete(
        {
            "algorithm": work.algorithm,
            "dataset": "synthetic",
            # One more per client, for testing, so that training has full batches.
            "synthetic": {
                "shape": SHAPE,
                "examples": work.clients * (work.examples + 1),
                "test_examples": 0,
            },
            "test_fraction": 1e-9,
            "partition": "iid",
            "clients": work.clients,
            "clients_per_round": work.cohort if work.cohort < work.clients else None,
            "model": work.network,
            "local_steps": work.local_steps,
            "local_epochs": None if work.local_steps else work.epochs,
            "batch_size": work.batch,
            "learning_rate": work.rate,
            "rounds": work.rounds,
            "seeds": work.seeds,
            "eval_every": work.rounds,
            **work.settings,
        }
    )


def compiled(work: Work) -> Workload:
    """Compiles a workload."""
    built = build(*sweep_settings.expand(configured(work)).values())
    (phase,) = built.phases
    rounds = phase.rounds
    key, arrays = rounds.place((phase.key, built.data))

    def place(number: int) -> Any:
        return rounds.place(jnp.int32(number))

    state, t, n = rounds.init(key), 0, place(work.rounds)
    began = time.perf_counter()
    run = rounds.run.lower(key, state, arrays, place(t), n).compile()
    seconds = time.perf_counter() - began

    def run_next() -> None:
        """Runs the next rounds, with newly sampled clients."""
        nonlocal state, t
        state, _ = run(key, state, arrays, place(t), n)
        t += work.rounds
        jax.block_until_ready(state)

    _check(built.data, work)
    network = configuration.MODELS[work.network](outputs=10)
    return Workload(
        run=run_next,
        compile_seconds=seconds,
        parameters=parameters(network),
        flops=work.batch * flops(network),
        plan=execution_plan.describe(phase.plan, work.cohort, phase.inputs.devices),
        program=run.as_text,
    )


def _check(arrays: FederatedData, work: Work) -> None:
    """Raises ValueError if a client has another number of examples than the workload."""
    sizes = {int(size) for size in arrays.train.size}
    if sizes != {work.examples}:
        raise ValueError(f"clients have {sizes} examples, and not {work.examples}")


def parameters(network: Any) -> int:
    """Returns the number of trained parameters."""
    shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, *SHAPE)))
    return trees.size(shapes["params"])


def flops(network: Any) -> float:
    """Returns the operations of a training step per example, by formula.

    Counts convolutions and fully connected layers only, with two operations per product. The
    gradients of weights and of inputs cost as much as the forward pass; the images need none.
    """
    products: list[int] = []

    def count(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = call(*args, **kwargs)
        if isinstance(context.module, (nn.Conv, nn.Dense)):
            kernel = context.module.variables["params"]["kernel"]
            products.append(math.prod(out.shape[1:-1]) * math.prod(kernel.shape))
        return out

    with nn.intercept_methods(count):
        jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, *SHAPE)))
    return 2.0 * (3 * sum(products) - products[0])


def peak() -> float:
    """Measures the FLOP/s of a float32 matrix product on all devices; the best of three tries."""
    side = _SIDE.get(jax.default_backend(), _LARGE)
    devices = jax.devices()
    matrices = [jax.device_put(jnp.ones((side, side), jnp.float32), device) for device in devices]
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(list(map(_square, matrices)))
        best = min(best, time.perf_counter() - began)
    return 2 * side**3 * len(devices) / best


@jax.jit
def _square(a: jax.Array) -> jax.Array:
    return a @ a


def busy_cores(seconds: float = 1.0) -> float | None:
    """Returns the cores in use by other processes, or None if the system does not tell.

    This process does nothing meanwhile. The load average also contains its own earlier work.
    """
    try:
        before = _ticks()
        time.sleep(seconds)
        after = _ticks()
    except (OSError, ValueError, IndexError):
        return None
    idle, total = (b - a for a, b in zip(before, after, strict=True))
    return round((1 - idle / total) * (os.cpu_count() or 1), 2) if total else None


def _ticks() -> tuple[int, int]:
    """Returns ticks of all cores since the start: idle or waiting for a disk, and in total."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def peak_memory(process: int | str = "self") -> int:
    """Returns the peak of the resident bytes of a process, see `forget_peak`."""
    status = Path(f"/proc/{process}/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    """Frees memory of earlier workloads, and resets the peak of `peak_memory` on Linux.

    Elsewhere it remains the peak since the start of the process.
    """
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident_memory() -> int:
    """Returns the resident bytes of this process now; on systems other than Linux the peak."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmRSS:")[1].split()[0])
    return peak_memory()


def machine() -> dict[str, Any]:
    """Returns facts about the machine."""
    return {
        "cores": cores(),
        "kind": _processor(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


DEFAULTS = {"pfedla": pfedla, "pfedhn": pfedhn, "fedmn": fedmn, "factorized_fl": factorized_fl}


def compile_seconds(name: str) -> tuple[float, float]:
    """Returns seconds to compile a run of a default configuration, without and with kept programs.

    As in a run, several programs of a phase are compiled in parallel.
    """
    settings = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    before = {key: jax.config.values[key] for key in settings}
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # otherwise JAX uses the previous folder
        try:
            return _compile(name), _compile(name)
        finally:
            for key, value in before.items():
                jax.config.update(key, value)
            compilation_cache.reset_cache()


def _compile(name: str) -> float:
    """Returns seconds to compile a run in an otherwise empty process, apart from kept programs."""
    jax.clear_caches()
    built = build(DEFAULTS[name].get_config())
    total, state = 0.0, None
    for phase in built.phases:
        began = time.perf_counter()
        program = DeviceProgram(phase.rounds, phase.key, built.data)
        state = program.enter(program.init(state))
        program.compile(state, 0)
        total += time.perf_counter() - began
        state, _ = program.run(state, 0, 1)
    return total
