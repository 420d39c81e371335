"""A run whose examples are on every device: all rounds of a call are one program.

Its clients are on every device, too, or spread over them.
"""

from typing import Any

import jax
import numpy as np

from fedjax_pfl.core.algorithm import Algorithm, State
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.simulation import spread
from fedjax_pfl.simulation.records import CompiledRounds, Evaluation, Log


class OnDevice:
    """A phase's rounds, of a run or of all points of a sweep; `Streamed` has the same methods."""

    def __init__(self, rounds: CompiledRounds, key: Any, data: FederatedData) -> None:
        self.rounds, (self.key, self.data) = rounds, rounds.place((key, data))
        self.calls: Any = rounds.run
        self.scores: Any = rounds.evaluate

    def init(self, start: State | None = None) -> State:
        """The first state, or one that begins where an earlier phase ended."""
        return self.rounds.init(self.key, start and self.rounds.enter(start))

    def enter(self, state: State) -> State:
        """A state as `run` takes it, also from NumPy arrays."""
        return self.rounds.enter(state)

    def compile(self, state: State, t: int) -> None:
        """So that no round waits for it."""
        now = self._number(t)
        self.calls = self.calls.lower(self.key, state, self.data, now, now).compile()
        self.scores = self.scores.lower(self.key, state, self.data, now).compile()

    def run(self, state: State, t: int, n: int) -> tuple[State, tuple[Log, ...]]:
        """Rounds t .. t+n-1; the logs as NumPy arrays. The state that it is given is used up."""
        state, logs = self.calls(self.key, state, self.data, self._number(t), self._number(n))
        return state, jax.device_get(jax.block_until_ready(logs))

    def evaluate(self, state: State, t: int) -> Evaluation:
        """In NumPy."""
        return jax.device_get(self.scores(self.key, state, self.data, self._number(t)))

    def observe(self, algorithm: Algorithm, state: State) -> dict[str, np.ndarray]:
        """What an algorithm shows of its state."""

        def shown(state: State) -> dict[str, jax.Array]:
            return algorithm.observe(spread.cut(state))

        return jax.device_get(jax.jit(shown, out_shardings=self.rounds.everywhere)(state))

    def _number(self, value: int) -> Any:
        return self.rounds.place(np.int32(value))
