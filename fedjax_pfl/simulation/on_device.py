"""Programs whose examples and state are on the devices: all rounds of a call are one program."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from fedjax_pfl.core.algorithm import Algorithm, State
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.simulation import spread
from fedjax_pfl.simulation.records import CompiledRounds, Evaluation, Log


class DeviceProgram:
    """Compiled rounds of a run, or of all runs of a sweep. `StreamedProgram` has the same methods.

    State is on every device, or spread over the devices by client. In a sweep, arrays of states and
    results have the runs on axis 0.

    Args:
      rounds: The compiled rounds.
      key: Random key of the run, or the `Points` of a sweep.
      data: Examples of all clients.
    """

    def __init__(self, rounds: CompiledRounds, key: Any, data: FederatedData) -> None:
        self.rounds, (self.key, self.data) = rounds, rounds.place((key, data))
        self._run: Any = rounds.run
        self._evaluate: Any = rounds.evaluate
        # One compilation for all evaluations of a method.
        self._observe = jax.jit(_observe, static_argnums=0, out_shardings=rounds.everywhere)

    def init(self, start: State | None = None) -> State:
        """Returns the initial state; `start` is the last state of the previous phase, if any."""
        return self.rounds.init(self.key, start and self.rounds.enter(start))

    def enter(self, state: State) -> State:
        """Puts a state, also one of NumPy arrays, on the devices as `run` takes it."""
        return self.rounds.enter(state)

    def compile(self, state: State, t: int) -> None:
        """Compiles `run` and `evaluate` for states like this one; `t` is any round."""
        number = self._number(t)
        # On a GPU the compiler times kernels, and two at a time would disturb each other.
        with ThreadPoolExecutor(2 if jax.default_backend() == "cpu" else 1) as pool:
            # `evaluate` is traced while `run` is compiled.
            run = pool.submit(self._run.lower(self.key, state, self.data, number, number).compile)
            evaluate = pool.submit(self._evaluate.lower(self.key, state, self.data, number).compile)
            self._run, self._evaluate = run.result(), evaluate.result()

    def run(self, state: State, t: int, n: int) -> tuple[State, tuple[Log, ...]]:
        """Runs rounds t to t + n - 1. Returns the state, and a log in NumPy for each group.

        The arrays of the logs are [n or more, K]. Those of the state that is passed in are used up.
        """
        state, logs = self._run(self.key, state, self.data, self._number(t), self._number(n))
        return state, jax.device_get(jax.block_until_ready(logs))

    def evaluate(self, state: State, t: int) -> Evaluation:
        """Scores all clients after `t` rounds, in NumPy."""
        return jax.device_get(self._evaluate(self.key, state, self.data, self._number(t)))

    def observe(self, algorithm: Algorithm, state: State) -> dict[str, np.ndarray]:
        """Returns the diagnostics of the method's `observe`, arrays by name."""
        return jax.device_get(self._observe(algorithm.observe, state))

    def _number(self, value: int) -> Any:
        return self.rounds.place(np.int32(value))


def _observe(observe: Callable[[State], dict[str, jax.Array]], state: State) -> Any:
    return observe(spread.cut(state))
