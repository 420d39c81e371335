"""From a configuration to all that a run needs: data, algorithms and compiled rounds per phase."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl import compress, data, local, memory, processes
from fedjax_pfl import config as configuration
from fedjax_pfl.algorithm import Algorithm, Federation, by_group
from fedjax_pfl.at_home import at_home
from fedjax_pfl.data.augment import on_normalised
from fedjax_pfl.errors import UsageError
from fedjax_pfl.rounds import Rounds, make_rounds
from fedjax_pfl.task import Task, classification, regression

# XLA allocated 1.31 times the estimate for pFedLA with 1,000 clients, less for small runs.
_SLACK = 4 / 3


class Phase(NamedTuple):
    """A part of a run that one algorithm fills."""

    config: ConfigDict
    begin: int  # its first round
    end: int
    federation: Federation  # the run's, but for who is active
    algorithm: Algorithm
    rounds: Rounds


class Built(NamedTuple):
    """Everything that a run needs, before anything is compiled or written."""

    phases: tuple[Phase, ...]
    data: data.FederatedData
    federation: Federation
    task: Task


def build(config: ConfigDict, words: configuration.Words = configuration.OURS) -> Built:
    """Load, partition and put together, or raise UsageError."""
    configuration.check(config, words)
    own = lambda name: config.get(name, ConfigDict()).to_dict()
    dataset = data.load(
        config.dataset,
        config.data_dir,
        fraction=config.fraction,
        fraction_seed=config.partition_seed,
        sources=words.dataset,
        **own(config.dataset),
    )
    arrays, federation, _ = data.federate(
        dataset,
        config.partition,
        settings=own(config.partition),
        clients=config.clients,
        seed=config.partition_seed,
        split=config.split,
        test_fraction=config.test_fraction,
        validation_fraction=config.validation_fraction,
        validation_examples=config.validation_examples,
        permute_labels=config.permute_labels,
        held_out=config.held_out,
        groups=max(1, len(config.groups)),
    )
    task = classification() if np.issubdtype(arrays.y.dtype, np.integer) else regression()
    if config.augment:
        if arrays.scale is None or len(federation.input_shape) != 3:
            raise UsageError(f"augment is for images, and {config.dataset} has none; leave it off")
        task = task._replace(augment=on_normalised(arrays.scale, arrays.shift))
    mesh = _mesh(config.devices)
    phases, begin, state = [], 0, None
    for one in configuration.phases(config, words):
        among = _taking_part(one, federation)
        algorithm = _algorithm(one, words, task, arrays, among, begin)
        make = partial(
            make_rounds,
            algorithm,
            task,
            among,
            cohort=one.clients_per_round or int(among.active.sum()),
            calls=boundary(one, begin, begin) - begin,
            dropout=one.dropout,
            max_update_norm=one.max_update_norm,
            after=one.evaluate_after,
            mesh=mesh,
        )
        # Whether each can start from the one before, and has room, is known before hours are spent.
        rounds, state = _with_room(one, make, arrays, state, federation.clients)
        phases.append(Phase(one, begin, begin + one.rounds, among, algorithm, rounds))
        begin += one.rounds
    return Built(tuple(phases), arrays, federation, task)


def _taking_part(one: ConfigDict, federation: Federation) -> Federation:
    """The federation of a phase: with `held_out` the novel clients are the active ones."""
    if one.participants == "active":
        return federation
    return federation._replace(active=~federation.active)


def _algorithm(
    one: ConfigDict,
    words: configuration.Words,
    task: Task,
    arrays: data.FederatedData,
    federation: Federation,
    begin: int,
) -> Algorithm:
    """The phase's algorithm: one per group of architectures where there are groups."""
    factory = words.algorithm[one.algorithm]
    ends = [begin + round(share * one.rounds) for share in one.learning_rate_drops]
    drops = np.asarray(ends, np.int32)
    training = local.sgd(
        learning_rate=lambda t: one.learning_rate * 0.1 ** jnp.sum(t >= drops).astype(jnp.float32),
        momentum=one.momentum,
        weight_decay=one.weight_decay,
        clip_norm=one.clip_norm,
        batch_size=one.batch_size,
        epochs=None if one.local_steps else one.local_epochs or 1,
        steps=one.local_steps,
        keep_momentum=one.keep_momentum,
        begin=begin,
        rounds=one.rounds,
    )
    own = one.get(one.algorithm, ConfigDict()).to_dict()
    each = configuration.groups(one, words)
    models = tuple(_model(words.model[group.model], group, federation) for group in each)
    # To its own algorithm a group is all there is: nobody else's model is ever stored there.
    within = lambda g: federation._replace(active=federation.active & (federation.groups == g))
    if len(models) == 1:
        algorithm = factory(models[0], task, training, federation, **own)
    elif "models" in inspect.signature(factory).parameters:  # it shares something between them
        algorithm = factory(models, task, training, federation, **own)
    else:
        made = (factory(m, task, training, within(g), **own) for g, m in enumerate(models))
        algorithm = by_group(tuple(made))
    if not isinstance(algorithm, Algorithm):
        raise UsageError(f"{one.algorithm} returns no Algorithm, but {type(algorithm).__name__}")
    # One example on the device tells the shapes as well as all of them.
    few = jax.tree.map(jnp.asarray, arrays._replace(x=arrays.x[:1], y=arrays.y[:1]))
    if one.keep_head:
        algorithm = at_home(algorithm, models[0], federation, few, {models[0].head})
    if one.upload_bits is None and one.upload_top_k is None:
        return algorithm
    return compress.compressed(
        algorithm, federation, few, bits=one.upload_bits, top_k=one.upload_top_k
    )


def _model(factory: Any, one: ConfigDict, federation: Federation) -> Any:
    """The network of a phase or group, if it can be built for these examples."""
    own = one.get(one.model, ConfigDict()).to_dict()
    if hasattr(factory, "conv"):
        own["conv"] = one.conv
    model = factory(outputs=federation.outputs, **own)
    shape = federation.input_shape
    try:
        jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, *shape))))
    except Exception as error:  # flax raises whatever a layer without room raises
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{one.model} {own} does not suit examples {shape}: {line}") from error
    return model


def _mesh(devices: int | None) -> jax.sharding.Mesh | None:
    chosen = processes.devices(devices)
    if len(chosen) == 1:
        return None
    axis = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((len(chosen),), ("clients",), axis, devices=chosen)


def _with_room(
    one: ConfigDict,
    make: Callable[..., Rounds],
    arrays: data.FederatedData,
    before: Any,
    clients: int,
) -> tuple[Rounds, Any]:
    """A phase's rounds, of as many clients at a time as memory_gb has room for; the state's shapes.

    before: the state's shapes at the end of the phase before.
    """
    chunk, key = one.chunk or _chunk(clients), jax.eval_shape(lambda: jax.random.key(0))
    rounds = make(chunk=chunk)
    state = jax.eval_shape(rounds.init, key, before)
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def needed(rounds: Rounds) -> float:
        """GB of a round or an evaluation, and of a checkpoint, which is a copy of the state."""
        run = memory.peak(rounds.run, key, state, arrays, number, number)
        evaluate = memory.peak(rounds.evaluate, key, state, arrays, number)
        return (_SLACK * max(run, evaluate) + memory.tree_bytes(state)) / 1e9

    while one.memory_gb is not None and (most := needed(rounds)) > one.memory_gb:
        if chunk == 1 or one.chunk:
            raise UsageError(
                f"with {chunk} of {clients} clients at a time this needs about {most:.3g} GB, and "
                f"memory_gb is {one.memory_gb}; take fewer clients, a smaller "
                f"{'chunk, ' if chunk > 1 else ''}model or batch_size"
            )
        chunk //= 2
        rounds = make(chunk=chunk)
    return rounds, state


def _chunk(clients: int) -> int:
    """On a CPU one client at a time fills a core; an accelerator wants them all together."""
    return 1 if jax.default_backend() == "cpu" else clients


def boundary(one: ConfigDict, begin: int, now: int) -> int:
    """The round at which the host next has something to do."""
    every = [one.eval_every, *([one.checkpoint_every] if one.checkpoint_every else [])]
    return min(begin + one.rounds, *(now + e - (now - begin) % e for e in every))
