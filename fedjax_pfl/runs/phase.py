"""A phase of a run: its inputs, its execution plan and its compiled rounds."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.runs import run_partitions
from fedjax_pfl.runs.phase_inputs import PhaseInputs
from fedjax_pfl.simulation.execution_plan import Plan
from fedjax_pfl.simulation.on_device import DeviceProgram
from fedjax_pfl.simulation.programs import make_program
from fedjax_pfl.simulation.records import CompiledRounds
from fedjax_pfl.simulation.streamed import StreamedProgram


class Phase(NamedTuple):
    """A part of a run with one algorithm."""

    inputs: PhaseInputs  # settings, examples and clients
    plan: Plan  # choices that affect speed only
    rounds: CompiledRounds  # compiled rounds of the algorithm
    store: str = "device"  # place of examples and state: device, sharded, host or disk

    def program(self, folder: Path | None) -> DeviceProgram | StreamedProgram:
        """Returns the compiled rounds with the examples, as a run calls them.

        `folder` is for files with state and examples if the store is "disk"; None: a temporary one.
        """
        if self.store == "device":  # also for sweeps
            return DeviceProgram(self.rounds, self.key, self.inputs.program_examples)
        make = self.inputs.function_maker(self.plan.chunk, by_client=self.store == "sharded")
        return make_program(
            make(self.algorithm),
            self.key,
            self.inputs.arrays,
            store=self.store,
            folder=folder,
            end=self.end,
        )

    @property
    def config(self) -> ConfigDict:
        """Returns the settings of the phase; in a sweep, those of its first run."""
        return self.inputs.configs[0]

    @property
    def begin(self) -> int:
        """Returns the number of rounds of earlier phases: the first round, counted from 0."""
        return self.inputs.begin

    @property
    def end(self) -> int:
        """Returns the round after the last."""
        return self.inputs.begin + self.config.rounds

    @property
    def federation(self) -> Federation:
        """Returns the federation; its active clients can differ between phases."""
        return self.inputs.federation

    @property
    def key(self) -> Any:
        """Returns the PRNG key of the run, or `Points` with the key of each run of a sweep."""
        return self.inputs.key()

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """Returns the algorithm of each run of a sweep, one for a single run."""
        return self.inputs.algorithms(self.plan.conv)

    @property
    def algorithm(self) -> Algorithm:
        """Returns the algorithm of the phase; in a sweep, that of its first run."""
        return self.algorithms[0]

    def select(self, runs: Sequence[int]) -> "Phase":
        """Returns the phase with only the runs of a sweep at these indices, not compiled yet."""
        if len(runs) == len(self.inputs.configs):
            return self
        inputs = dataclasses.replace(
            self.inputs,
            configs=[self.inputs.configs[i] for i in runs],
            examples=run_partitions.select(self.inputs.examples, runs),
        )
        return self._replace(inputs=inputs, rounds=inputs.rounds(self.plan))
