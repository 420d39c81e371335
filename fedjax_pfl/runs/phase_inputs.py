"""Inputs of a phase of a run, and the algorithms and rounds that are made from them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_pfl import data, transforms
from fedjax_pfl.core import local_training, optimizers
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import UsageError, first_line
from fedjax_pfl.core.groups import by_group, group_federation
from fedjax_pfl.core.shape_check import check_shapes
from fedjax_pfl.data.checks import describe_holder
from fedjax_pfl.networks.pretrained import Pretrained
from fedjax_pfl.networks.torch_weights import from_torch
from fedjax_pfl.networks.user_defined import (
    UserNetwork,
    check_network,
    check_output_shape,
    check_tokens,
)
from fedjax_pfl.networks.zero_head import ZeroHead
from fedjax_pfl.runs import run_partitions
from fedjax_pfl.runs.sweep_settings import setting_values
from fedjax_pfl.settings import configuration, stragglers
from fedjax_pfl.simulation import execution_plan, sweep
from fedjax_pfl.simulation.execution_plan import Plan
from fedjax_pfl.simulation.records import CompiledRounds, RoundFunctions
from fedjax_pfl.simulation.rounds import compile_rounds, round_functions

# With more clients than this, a sample of them is evaluated unless `evaluate_clients` is set.
_MAX_EVALUATED = 10_000
# A run with more classes, or more entries over all clients, writes no confusion matrix.
_MAX_CONFUSION_CLASSES = 100
_MAX_CONFUSION_ENTRIES = 10_000_000


@dataclasses.dataclass(eq=False)
class PhaseInputs:
    """Everything that determines the rounds of a phase, except the execution plan."""

    configs: Sequence[ConfigDict]  # settings of the phase in each run of a sweep
    group_configs: Sequence[ConfigDict]  # settings of each architecture group, in the first run
    swept: Sequence[str]  # names of the settings that differ between the runs
    registry: configuration.Registry  # components by name
    examples: Sequence[data.FederatedData]  # of each run, or one for all runs
    federation: Federation  # facts about the clients
    begin: int  # number of rounds of earlier phases
    mesh: Mesh | None  # devices that share the clients; None for one device
    is_attacker: np.ndarray  # bool [N]: clients that attack the training
    triggered: data.FederatedData | None  # examples that show the success of a backdoor

    @property
    def arrays(self) -> data.FederatedData:
        """Returns the examples of all clients; with own partitions, those of the first run."""
        return self.examples[0]

    @functools.cached_property
    def program_examples(self) -> data.FederatedData:
        """Returns the examples as the program takes them; own partitions have runs on axis 0."""
        return run_partitions.stack(self.examples)

    @property
    def cohort(self) -> int:
        """Returns the number of clients sampled in a round."""
        return self.configs[0].clients_per_round or int(self.federation.active.sum())

    @property
    def devices(self) -> int:
        """Returns the number of devices."""
        return self.mesh.size if self.mesh else 1

    def key(self) -> Any:
        """Returns the PRNG key of the run, or `Points` with the key of each run of a sweep."""
        if len(self.configs) == 1:
            return jax.random.key(self.configs[0].seed)
        return sweep.points([config.seed for config in self.configs])

    @property
    def _swept_values(self) -> dict[str, tuple[Any, ...]]:
        return setting_values(self.configs, self.swept)

    @functools.cached_property
    def algorithms(self) -> Callable[[str], tuple[Algorithm, ...]]:
        """Returns a function from a value of the setting `conv` to the algorithm of each run.

        Making an algorithm checks its settings.
        """
        return functools.cache(self._make_algorithms)

    def _make_algorithms(self, conv: str) -> tuple[Algorithm, ...]:
        """Returns the algorithm of each run of a sweep; equal settings share one."""
        values = list(zip(*self._swept_values.values(), strict=True)) or [()] * len(self.configs)
        settings = {v: dict(zip(self.swept, v, strict=True)) for v in values}
        by_values = {v: _algorithm(self, conv, settings[v]) for v in settings}
        return tuple(by_values[v] for v in values)

    @functools.cached_property
    def evaluated(self) -> np.ndarray | None:
        """Returns the sorted ids of the evaluated clients, int32 [E]; None: all."""
        config = self.configs[0]
        active = np.flatnonzero(self.federation.active & ~self.is_attacker)
        count = config.evaluate_clients
        if count is None and len(active) > _MAX_EVALUATED:
            count = max(1, self.cohort * config.eval_every // 2)  # half the updates in between
        if count is None or count >= self.federation.clients:
            return None
        rng = np.random.default_rng([config.partition_seed, 0xE7A1])
        sampled_clients = rng.choice(active, min(count, len(active)), replace=False)
        return np.sort(sampled_clients).astype(np.int32)

    @property
    def count_confusion(self) -> bool:
        """Returns True if evaluations count confusion matrices.

        The task must have classes, which all clients number alike: no client has labels or classes
        of its own, such as the characters of its alphabet. Neither the classes nor the entries of
        all clients' matrices may be too many: at most 100 and 10 million.
        """
        clients, classes = self.federation.clients, self.federation.outputs
        return (
            self.federation.task.has_classes
            and self.arrays.label_map is None
            and self.arrays.classes is None
            and classes <= _MAX_CONFUSION_CLASSES
            and clients * classes**2 <= _MAX_CONFUSION_ENTRIES
        )

    def function_maker(
        self, chunk: int, *, by_client: bool = False
    ) -> Callable[[Algorithm], RoundFunctions]:
        """Returns a function from an algorithm to its rounds, which are not compiled yet.

        `chunk` clients are vmapped together. With `by_client`, rows and client-side state are
        spread over the mesh.
        """
        config = self.configs[0]
        make = functools.partial(_algorithm, self, config.conv)
        speeds = stragglers.client_speeds(config.get, self.federation, self.arrays, make)
        return functools.partial(
            round_functions,
            federation=self.federation,
            cohort=self.cohort,
            max_rounds=next_boundary(config, self.begin, self.begin) - self.begin,
            sampling=config.sampling,
            dropout=config.dropout,
            client_speeds=speeds,
            max_update_norm=config.max_update_norm,
            evaluate_after=config.evaluate_after,
            validate_after=config.validate_after,
            evaluated_ids=self.evaluated,
            count_confusion=self.count_confusion,
            chunk=chunk,
            mesh=self.mesh,
            by_client=by_client,
        )

    def rounds(self, plan: Plan) -> CompiledRounds:
        """Returns the rounds of the run or of all runs of a sweep; they compile when called."""
        make_functions = self.function_maker(plan.chunk)
        if len(self.configs) == 1:
            return compile_rounds(make_functions(self.algorithms(plan.conv)[0]), self.mesh)

        def make(settings: Mapping[str, Any]) -> Any:
            return make_functions(_algorithm(self, plan.conv, settings))

        return sweep.make_rounds(
            make,
            self._swept_values,
            self.mesh,
            execution_plan.default_chunk(len(self.configs)),
            own_data=len(self.examples) > 1,
        )


def _algorithm(inputs: PhaseInputs, conv: str, settings: Mapping[str, Any]) -> Algorithm:
    """Returns the algorithm of a phase with its transforms; with groups, one that combines theirs.

    `conv` is the lowering of convolutions. `settings` has values of swept settings by name, also
    traced ones, instead of the configuration's.
    """
    config, federation = inputs.configs[0], inputs.federation
    factory = inputs.registry.algorithm[config.algorithm]

    def value_of(name: str) -> Any:
        return settings.get(name, config.get(name))

    method_settings = {
        name: settings.get(f"{config.algorithm}.{name}", setting)
        for name, setting in config.get(config.algorithm, ConfigDict()).to_dict().items()
    }
    parameters = inspect.signature(factory).parameters
    schedule = {"rounds": config.rounds, "first_round": inputs.begin}
    method_settings |= {name: schedule[name] for name in schedule if name in parameters}
    training = transforms.selected_training(value_of, federation, make_training(inputs, value_of))
    models = tuple(make_network(inputs, group, conv) for group in inputs.group_configs)

    if len(models) == 1:
        algorithm = factory(models[0], training, federation, **method_settings)
    elif "models" in parameters:  # shares something between groups
        algorithm = factory(models, training, federation, **method_settings)
    else:
        members = (
            factory(model, training, group_federation(federation, g), **method_settings)
            for g, model in enumerate(models)
        )
        algorithm = by_group(tuple(members))
    if not isinstance(algorithm, Algorithm):
        raise UsageError(
            f"{config.algorithm} must return an Algorithm, got {type(algorithm).__name__}"
        )
    # Shapes need one example only.
    arrays = inputs.arrays
    one_example = jax.device_put(arrays._replace(x=arrays.x[:1], y=arrays.y[:1]))
    is_traced = any(isinstance(value, jax.core.Tracer) for value in settings.values())
    if config.algorithm not in configuration.BUILTINS.algorithm and not is_traced:
        check_shapes(config.algorithm, algorithm, federation, one_example)
    context = transforms.TransformContext(
        model=models[0],
        federation=federation,
        data=one_example,
        registry=inputs.registry._asdict(),
        training=training,
    )
    return transforms.chain(algorithm, *transforms.selected_transforms(value_of, context))


def make_training(inputs: PhaseInputs, value_of: Callable[[str], Any]) -> local_training.Training:
    """Returns the local training of a phase; `value_of` returns a setting's value by name."""
    config = inputs.configs[0]
    rate, step_schedule = _rate(inputs, config, value_of)
    return local_training.make_training(
        inputs.registry.optimizer[config.optimizer](value_of),
        learning_rate=rate,
        step_schedule=step_schedule,
        clip_norm=value_of("clip_norm"),
        batch_size=config.batch_size,
        epochs=None if config.local_steps else config.local_epochs or 1,
        steps=config.local_steps,
        drop_last=config.drop_last,
        keep_optimizer=config.keep_optimizer,
    )


def _rate(
    inputs: PhaseInputs, config: ConfigDict, value_of: Callable[[str], Any]
) -> tuple[Callable[[jax.Array], Any], Any]:
    """Returns the learning rate as a function of the round, and the schedule within a round.

    The schedule maps (step, steps) to a factor; None if there is none. `value_of` returns a
    setting's value by name, traced if swept.
    """
    if config.optimizer not in optimizers.OPTIMIZERS:  # a user-defined one has its own rate
        return local_training.constant_rate(1.0), None
    ends = [inputs.begin + round(share * config.rounds) for share in config.learning_rate_drops]
    drops = np.asarray(ends, np.int32)
    rate, factor = value_of("learning_rate"), None
    if config.learning_rate_schedule != "constant":
        factor = optimizers.schedule(
            config.learning_rate_schedule, config.schedule_end, config.schedule_warmup
        )
    over_rounds = factor if config.schedule_over == "rounds" else None

    def round_rate(t: jax.Array) -> Any:
        if over_rounds or len(drops):
            # The last evaluation, in round t = end, fine-tunes at the rate of the last round,
            # because a schedule may end at 0.
            t = jnp.minimum(t, inputs.begin + config.rounds - 1)
        dropped = rate * 0.1 ** jnp.sum(t >= drops).astype(jnp.float32)
        return over_rounds(t - inputs.begin, config.rounds) * dropped if over_rounds else dropped

    return round_rate, None if over_rounds else factor


def make_network(inputs: PhaseInputs, config: ConfigDict, conv: str) -> Any:
    """Returns the network of a phase or group. Raises UsageError if it does not fit the task.

    `conv` is the lowering of convolutions.
    """
    factory, federation = inputs.registry.model[config.model], inputs.federation
    settings = config.get(config.model, ConfigDict()).to_dict()
    options = {name: value for name, value in settings.items() if name != "digest"}
    if hasattr(factory, "conv"):
        settings["conv"] = conv
    shape, dtype = federation.input_shape, federation.input_dtype
    try:
        model = factory(outputs=federation.outputs, **settings)
        if isinstance(model, UserNetwork):
            model = dataclasses.replace(model, input_shape=shape, input_dtype=dtype, conv=conv)
        outputs = check_network(config.model, model, jax.eval_shape(lambda: federation.examples(2)))
    except Exception as error:  # flax raises any type if an input is too small for a layer
        if isinstance(error, UsageError) and config.model not in configuration.MODELS:
            raise
        line = first_line(error)
        label = f"{config.model} {options}" if options else config.model
        if config.model not in configuration.MODELS:
            hint = "; an NNX module has Dropout(..., rngs=rngs)" if "rngs" in line else ""
            raise UsageError(f"{label} fails for examples {shape}: {line}{hint}") from error
        fitting = _fitting_networks(federation)
        hint = "" if config.model in fitting else f"; use {' or '.join(fitting)}"
        raise UsageError(f"{label} does not suit examples {shape}: {line}{hint}") from error
    check_output_shape(config.model, outputs, federation.output_shape)
    if dtype == "int32":
        _check_vocabulary(inputs, config.model, model)
    if path := inputs.configs[0].initial_weights:
        model = Pretrained(model, from_torch(path, model, shape))
    return ZeroHead(model) if config.zero_head else model


def _check_vocabulary(inputs: PhaseInputs, name: str, model: Any) -> None:
    """Raises UsageError if `model`, with setting `name`, has no embedding of an example's token."""
    if not (problem := check_tokens(model, inputs.arrays.x)):
        return
    place, size = problem
    row, column = divmod(place, int(np.prod(inputs.federation.input_shape)))
    token = inputs.arrays.x.flat[place]
    holder = describe_holder(inputs.arrays, inputs.federation, row)
    raise UsageError(
        f"{inputs.configs[0].dataset}: {holder} has the token "
        f"{token} in column {column} of x, and {name} embeds those from 0 to {size - 1}; "
        f"{'number tokens from 0' if token < 0 else 'give it a larger vocabulary'}"
    )


def _fitting_networks(federation: Federation) -> tuple[str, ...]:
    """Returns names of built-in networks that suit the shape and dtype of the inputs."""
    if np.issubdtype(federation.input_dtype, np.integer):
        return ("lstm", "transformer") if federation.positions else ("fasttext", "mlp")
    return {1: ("mlp",), 2: ("cnn1d", "mlp")}.get(len(federation.input_shape), ("small", "mlp"))


def next_boundary(config: ConfigDict, begin: int, t: int) -> int:
    """Returns the next round after `t` at which an evaluation or checkpoint is due.

    `config` are the settings of the phase, whose first round is `begin`.
    """
    intervals = filter(None, (config.eval_every, config.checkpoint_every))
    return min(begin + config.rounds, *(t + n - (t - begin) % n for n in intervals))
