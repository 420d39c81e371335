"""Programs of a run: where its state and its examples are stored, and how rounds reach them."""

import copy
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.simulation.on_device import DeviceProgram
from fedjax_pfl.simulation.records import RoundFunctions
from fedjax_pfl.simulation.rounds import compile_rounds
from fedjax_pfl.simulation.streamed import StreamedProgram

STORES = ("device", "sharded", "host", "disk")
OFF_DEVICE = ("host", "disk")


def make_program(
    functions: RoundFunctions,
    key: Any,
    data: FederatedData,
    *,
    store: str = "device",
    folder: Path | None = None,
    end: int | None = None,
) -> DeviceProgram | StreamedProgram:
    """Returns the program that computes the rounds and evaluations of one run.

    Args:
      functions: The method's rounds; with store="sharded" made with `by_client=True`.
      key: Random key of the run.
      data: Examples of all clients.
      store: Where client-side state is stored, one of `STORES`.
      folder: Folder for store="disk". Default: a temporary one.
      end: Index after the last round. No cohort is prefetched from there on. Default: no end.
    """
    mesh = functions.spec.mesh
    if store in OFF_DEVICE:
        return StreamedProgram(functions, key, data, mesh, end=end, store=store, folder=folder)
    return DeviceProgram(compile_rounds(functions, mesh), key, data)


def with_examples(
    program: DeviceProgram | StreamedProgram, data: FederatedData
) -> DeviceProgram | StreamedProgram:
    """Returns a program that evaluates other examples of the same shapes, without compiling."""
    other = copy.copy(program)
    if isinstance(other, DeviceProgram):
        other.data = other.rounds.place(data)
    else:
        other.data = jax.tree.map(np.asarray, data)
    return other
