"""Shortest possible time of a client step, from its operations and bytes (the roofline)."""

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.libraries import work
from fedjax_pfl.settings import configuration

# Bytes per second by the makers' data sheets, for records without a measurement.
BANDWIDTHS = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
_NUMBERS = 2**26  # that are copied to measure the bandwidth: more than caches hold


def least_bytes(network: Any, batch: int) -> int:
    """Returns the bytes that a training step reads and writes at least, in float32.

    Only convolutions and fully connected layers count, as if all between them were fused. The input
    of a layer is written, and read in both passes; its gradient is written and read. Images are
    only read, twice. Parameters are read in both passes and written once.
    """
    inputs: list[int] = []

    def note_input(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, (nn.Conv, nn.Dense)):
            inputs.append(math.prod(args[0].shape[1:]))
        return call(*args, **kwargs)

    with nn.intercept_methods(note_input):
        jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, *work.SHAPE)))
    images, *hidden = inputs
    return 4 * (batch * (2 * images + 5 * sum(hidden)) + 3 * work.parameters(network))


def bandwidth() -> float:
    """Measures bytes per second of copies from memory to memory on all devices; best of three."""
    devices = jax.devices()
    part = jnp.ones(_NUMBERS // len(devices), jnp.float32)
    parts = [jax.device_put(part, device) for device in devices]
    best = math.inf
    for _ in range(4):  # the first compiles
        began = time.perf_counter()
        parts = jax.block_until_ready(list(map(_increment, parts)))
        best = min(best, time.perf_counter() - began)
    return 8 * part.size * len(devices) / best


@partial(jax.jit, donate_argnums=0)  # new memory would have to be mapped first
def _increment(numbers: jax.Array) -> jax.Array:
    return numbers + 1


def share(name: str, item: Mapping[str, Any], device: str) -> float | None:
    """Returns the shortest possible time of a measured client step, divided by its time.

    Returns None if neither record nor data sheet has the bandwidth. The peak was measured
    with float32 products at the same time.
    """
    rate = item.get("bytes_per_second", BANDWIDTHS.get(device))
    if rate is None or name not in work.WORKS:
        return None
    network = configuration.MODELS[work.WORKS[name].network](outputs=10)
    peak = 1e9 * sorted(item["peak_gflops"])[len(item["peak_gflops"]) // 2]
    times = item["flops_per_client_step"] / peak, least_bytes(network, item["batch"]) / rate
    return max(times) / (1e-3 * item["who"]["library"]["ms_per_client_step"])
