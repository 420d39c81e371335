"""A phase of a run: the algorithm that its settings make, and its rounds, compiled when called."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_pfl import data, transforms
from fedjax_pfl.core import local_training, optimizers
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.core.shape_check import check_shapes
from fedjax_pfl.data.checks import describe_holder
from fedjax_pfl.networks.user_defined import UserNetwork, check, check_tokens
from fedjax_pfl.networks.zero_head import ZeroHead
from fedjax_pfl.runs import points
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation import execution_plan, sweep
from fedjax_pfl.simulation.execution_plan import Plan
from fedjax_pfl.simulation.on_device import DeviceProgram
from fedjax_pfl.simulation.programs import make_program
from fedjax_pfl.simulation.records import CompiledRounds, RoundFunctions
from fedjax_pfl.simulation.rounds import compiled, round_functions
from fedjax_pfl.simulation.streamed import StreamedProgram

_MANY = 10_000  # clients; of more than that not all are evaluated, unless that is said


@dataclasses.dataclass(eq=False)
class PhaseInputs:
    """What a phase's rounds are made from, but for their plan."""

    alike: Sequence[ConfigDict]  # the phase in each point of a sweep
    groups: Sequence[ConfigDict]  # the first point's, for each group of architectures
    swept: Sequence[str]  # the names of settings that differ between points of the sweep
    words: configuration.Registry
    arrays: data.FederatedData
    federation: Federation
    begin: int
    mesh: Mesh | None
    # Whatever has asked for the number of rounds, as a schedule over all of them does.
    asked: set[str] = dataclasses.field(default_factory=set)

    @property
    def cohort(self) -> int:
        return self.alike[0].clients_per_round or int(self.federation.active.sum())

    @property
    def devices(self) -> int:
        return self.mesh.size if self.mesh else 1

    def points(self) -> Any:
        """What its rounds take as key."""
        if len(self.alike) == 1:
            return jax.random.key(self.alike[0].seed)
        return sweep.points([one.seed for one in self.alike])

    @property
    def _values(self) -> dict[str, tuple[Any, ...]]:
        return points.values(self.alike, self.swept)

    @functools.cached_property
    def algorithms(self) -> Callable[[str], tuple[Algorithm, ...]]:
        """By lowering, that of each point, with which its numbers are checked."""
        return functools.cache(self._made)

    def _made(self, conv: str) -> tuple[Algorithm, ...]:
        own = list(zip(*self._values.values(), strict=True)) or [()] * len(self.alike)
        each = {one: dict(zip(self.swept, one, strict=True)) for one in own}
        made = {one: _algorithm(self, conv, values) for one, values in each.items()}
        return tuple(made[one] for one in own)

    @functools.cached_property
    def evaluated(self) -> np.ndarray | None:
        """The ids of those who are evaluated, the same in all evaluations; None: all."""
        one, active = self.alike[0], np.flatnonzero(self.federation.active)
        most = one.evaluate_clients
        if most is None and len(active) > _MANY:  # half as many as train between two evaluations
            most = max(1, self.cohort * one.eval_every // 2)
        if most is None or most >= len(active):
            return None
        rng = np.random.default_rng([one.partition_seed, 0xE7A1])
        return np.sort(rng.choice(active, most, replace=False)).astype(np.int32)

    def plain(self, chunk: int, *, by_client: bool = False) -> Callable[..., RoundFunctions]:
        """From an algorithm to its rounds, to be compiled."""
        one = self.alike[0]
        return functools.partial(
            round_functions,
            federation=self.federation,
            cohort=self.cohort,
            max_rounds=next_boundary(one, self.begin, self.begin) - self.begin,
            dropout=one.dropout,
            max_update_norm=one.max_update_norm,
            evaluate_after=one.evaluate_after,
            validate_after=one.validate_after,
            evaluated_ids=self.evaluated,
            chunk=chunk,
            mesh=self.mesh,
            by_client=by_client,
        )

    def rounds(self, plan: Plan) -> CompiledRounds:
        """Compiled when they are first called."""
        plain = self.plain(plan.chunk)
        if len(self.alike) == 1:
            return compiled(plain(self.algorithms(plan.conv)[0]), self.mesh)

        def make(values: Mapping[str, Any]) -> Any:
            return plain(_algorithm(self, plan.conv, values))

        return sweep.make_rounds(
            make, self._values, self.mesh, execution_plan.default_chunk(len(self.alike))
        )


class Phase(NamedTuple):
    """A part of a run that one algorithm fills."""

    inputs: PhaseInputs
    plan: Plan
    rounds: CompiledRounds
    store: str = "device"  # where examples and state are kept

    def program(self, folder: Path | None) -> DeviceProgram | StreamedProgram:
        """Returns the compiled rounds with the examples, as a run calls them.

        Args:
          folder: Folder for data that does not fit into memory.
        """
        if self.store == "device":  # also for sweeps
            return DeviceProgram(self.rounds, self.points, self.inputs.arrays)
        make = self.inputs.plain(self.plan.chunk, by_client=self.store == "sharded")
        return make_program(
            make(self.algorithm),
            self.points,
            self.inputs.arrays,
            store=self.store,
            folder=folder,
            end=self.end,
        )

    @property
    def config(self) -> ConfigDict:
        """Of the first point, where there are several."""
        return self.inputs.alike[0]

    @property
    def begin(self) -> int:
        """Its first round."""
        return self.inputs.begin

    @property
    def end(self) -> int:
        return self.inputs.begin + self.config.rounds

    @property
    def federation(self) -> Federation:
        """The run's, but for who is active."""
        return self.inputs.federation

    @property
    def points(self) -> Any:
        """What its rounds take as key: a key, or the Points of a sweep."""
        return self.inputs.points()

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """Of each point."""
        return self.inputs.algorithms(self.plan.conv)

    @property
    def algorithm(self) -> Algorithm:
        """Of a run that is no sweep, or of its first point."""
        return self.algorithms[0]

    def of(self, points: Sequence[int]) -> "Phase":
        """The same of some points, not yet compiled; of a single one, a run of its own."""
        if len(points) == len(self.inputs.alike):
            return self
        inputs = dataclasses.replace(self.inputs, alike=[self.inputs.alike[i] for i in points])
        return Phase(inputs, self.plan, inputs.rounds(self.plan), self.store)


def _algorithm(inputs: PhaseInputs, conv: str, settings: Mapping[str, Any]) -> Algorithm:
    """The phase's algorithm: one per group of architectures where there are groups.

    settings: values in the place of the configuration's, by name.
    """
    one, words, federation = inputs.alike[0], inputs.words, inputs.federation
    factory = words.algorithm[one.algorithm]

    def value(name: str) -> Any:
        return settings.get(name, one.get(name))

    rate, step_schedule = _rate(inputs, one, value)
    training = local_training.make_training(
        words.optimizer[one.optimizer](value),
        learning_rate=rate,
        step_schedule=step_schedule,
        clip_norm=value("clip_norm"),
        batch_size=one.batch_size,
        epochs=None if one.local_steps else one.local_epochs or 1,
        steps=one.local_steps,
        drop_last=one.drop_last,
        keep_optimizer=one.keep_optimizer,
        first_round=inputs.begin,
        rounds=one.rounds,
    )
    training = _noting(training, functools.partial(inputs.asked.add, one.algorithm))
    own = {
        name: settings.get(f"{one.algorithm}.{name}", setting)
        for name, setting in one.get(one.algorithm, ConfigDict()).to_dict().items()
    }
    models = tuple(_model(inputs, g, conv) for g in inputs.groups)

    def of_group(g: int) -> Federation:
        """Of a group that has an algorithm of its own: nobody else's model is stored there."""
        return federation._replace(active=federation.active & (federation.groups == g))

    if len(models) == 1:
        algorithm = factory(models[0], training, federation, **own)
    elif "models" in inspect.signature(factory).parameters:  # it shares something between them
        algorithm = factory(models, training, federation, **own)
    else:
        made = (factory(m, training, of_group(g), **own) for g, m in enumerate(models))
        algorithm = by_group(tuple(made))
    if not isinstance(algorithm, Algorithm):
        raise UsageError(f"{one.algorithm} returns no Algorithm, but {type(algorithm).__name__}")
    # One example on the device tells the shapes as well as all of them.
    few = jax.device_put(inputs.arrays._replace(x=inputs.arrays.x[:1], y=inputs.arrays.y[:1]))
    swept = any(isinstance(value, jax.core.Tracer) for value in settings.values())
    if one.algorithm not in configuration.BUILTINS.algorithm and not swept:
        check_shapes(one.algorithm, algorithm, federation, few)
    context = transforms.TransformContext(
        model=models[0], federation=federation, data=few, registry=words._asdict()
    )
    return transforms.chain(algorithm, *transforms.selected_transforms(value, context))


def _rate(
    inputs: PhaseInputs, one: ConfigDict, value_of: Callable[[str], Any]
) -> tuple[Callable[[jax.Array], Any], Any]:
    """The learning rate of a round, and what multiplies it within a visit, or None."""
    if one.optimizer not in optimizers.OPTIMIZERS:  # which has a rate inside
        return local_training.constant_rate(1.0), None
    ends = [inputs.begin + round(share * one.rounds) for share in one.learning_rate_drops]
    drops = np.asarray(ends, np.int32)
    rate, factor = value_of("learning_rate"), None
    if one.learning_rate_schedule != "constant":
        factor = optimizers.schedule(
            one.learning_rate_schedule, one.schedule_end, one.schedule_warmup
        )
    over_rounds = factor if one.schedule_over == "rounds" else None

    def rate_of(t: jax.Array) -> Any:
        now = rate * 0.1 ** jnp.sum(t >= drops).astype(jnp.float32)
        return over_rounds(t - inputs.begin, one.rounds) * now if over_rounds else now

    return rate_of, None if over_rounds else factor


def _noting(training: local_training.Training, note: Callable[[], None]) -> Any:
    """The same training, which tells when an algorithm asks for the number of rounds."""

    class Noting(type(training)):  # type: ignore[misc]
        @property
        def rounds(self) -> int:
            note()
            return training.rounds

    return Noting(*training)


def _model(inputs: PhaseInputs, one: ConfigDict, conv: str) -> Any:
    """The network of a phase or group, if it can be built for these examples and this task."""
    factory, federation = inputs.words.model[one.model], inputs.federation
    own = one.get(one.model, ConfigDict()).to_dict()
    told = {key: value for key, value in own.items() if key != "digest"}
    if hasattr(factory, "conv"):
        own["conv"] = conv
    shape, dtype = federation.input_shape, federation.input_dtype
    try:
        model = factory(outputs=federation.outputs, **own)
        if isinstance(model, UserNetwork):
            model = dataclasses.replace(model, input_shape=shape, input_dtype=dtype, conv=conv)
        outputs = check(one.model, model, jax.eval_shape(lambda: federation.examples(2)))
    except Exception as error:  # flax raises whatever a layer without room raises
        if isinstance(error, UsageError) and one.model not in configuration.MODELS:
            raise
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        named = f"{one.model} {told}" if told else one.model
        if one.model not in configuration.MODELS:
            hint = "; an NNX module has Dropout(..., rngs=rngs)" if "rngs" in line else ""
            raise UsageError(f"{named} fails for examples {shape}: {line}{hint}") from error
        suits = _suiting(federation)
        hint = "" if one.model in suits else f"; for such examples there is {' or '.join(suits)}"
        raise UsageError(f"{named} does not suit examples {shape}: {line}{hint}") from error
    wanted = (2, *federation.positions, federation.outputs)
    if getattr(outputs, "shape", None) != wanted:
        of = "each position and class" if federation.positions else "each class, label or target"
        raise UsageError(
            f"{one.model} gives {list(getattr(outputs, 'shape', []))} for 2 examples, and their "
            f"task needs {list(wanted)}, an output for {of}"
        )
    if dtype == "int32" and (found := check_tokens(one.model, model, inputs.arrays.x)):
        place, rows = found
        row, column = divmod(place, int(np.prod(shape)))
        token = inputs.arrays.x.flat[place]
        holder = describe_holder(inputs.arrays, federation, row)
        raise UsageError(
            f"{inputs.alike[0].dataset}: {holder} has the token "
            f"{token} in column {column} of x, and {one.model} embeds those from 0 to {rows - 1}; "
            f"{'number tokens from 0' if token < 0 else 'give it a larger vocabulary'}"
        )
    return ZeroHead(model) if one.zero_head else model


def _suiting(federation: Federation) -> tuple[str, ...]:
    """Networks of ours for examples of this kind."""
    if np.issubdtype(federation.input_dtype, np.integer):
        return ("lstm", "transformer")
    return {1: ("mlp",), 2: ("cnn1d", "mlp")}.get(len(federation.input_shape), ("small", "mlp"))


def next_boundary(one: ConfigDict, begin: int, now: int) -> int:
    """Returns the round at which the next evaluation or checkpoint is due."""
    every = [one.eval_every, *([one.checkpoint_every] if one.checkpoint_every else [])]
    return min(begin + one.rounds, *(now + e - (now - begin) % e for e in every))
