"""Algorithms around algorithms: chain(algorithm, compression(...), private_layers(...))."""

from fedjax_pfl.transforms.compression import compression
from fedjax_pfl.transforms.private_layers import private_layers
from fedjax_pfl.transforms.wrapping import Transform, chain

__all__ = ["Transform", "chain", "compression", "private_layers"]
