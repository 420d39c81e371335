"""From a configuration to all that a run needs: data, algorithms and compiled rounds per phase."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fedjax_pfl import compress, data, local, memory, plan, processes, sweep
from fedjax_pfl import config as configuration
from fedjax_pfl.algorithm import Algorithm, Federation, by_group
from fedjax_pfl.at_home import at_home
from fedjax_pfl.data.augment import on_normalised
from fedjax_pfl.errors import UsageError
from fedjax_pfl.plan import Plan
from fedjax_pfl.rounds import Rounds, compiled, plain_rounds
from fedjax_pfl.task import Task, classification, regression

# XLA allocated 1.31 times the estimate for pFedLA with 1,000 clients, less for small runs.
_SLACK = 4 / 3


class Phase(NamedTuple):
    """A part of a run that one algorithm fills."""

    config: ConfigDict  # of the first point, where there are several
    points: Any  # what its rounds take as key: a key, or the Points of a sweep
    begin: int  # its first round
    end: int
    federation: Federation  # the run's, but for who is active
    algorithm: Algorithm
    rounds: Rounds
    plan: Plan


class Built(NamedTuple):
    """Everything that a run needs, before anything is compiled or written."""

    phases: tuple[Phase, ...]
    data: data.FederatedData
    federation: Federation
    task: Task


def build(
    *configs: ConfigDict,
    words: configuration.Words = configuration.OURS,
    plans: Sequence[Plan] | None = None,
) -> Built:
    """Load, partition and put together, or raise UsageError.

    Args:
      configs: one; or the points of a sweep, for a program that computes them all.
      plans: one for each phase, where a run goes on that had them.
    """
    for one in configs:
        configuration.check(one, words)
    config = configs[0]
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
    phases, works, begin, state = [], [], 0, None
    each = [configuration.phases(one, words) for one in configs]
    unread = sweep.differing(configs)
    for number, alike in enumerate(zip(*each, strict=True)):
        one, settings = alike[0], sweep.values(alike)
        unread -= set(settings)
        among = _taking_part(one, federation)
        work = _Work(alike, settings, words, task, arrays, among, begin, mesh)
        work.algorithm(one.conv)  # which checks the numbers of every point
        # Whether each can start from the one before, and has room, is known before hours are spent.
        chosen, rounds, state = _with_room(
            work, plans[number] if plans and number < len(plans) else None, state
        )
        end = begin + one.rounds
        algorithm = work.algorithm(chosen.conv)
        phases.append(Phase(one, work.points(), begin, end, among, algorithm, rounds, chosen))
        works.append(work)
        begin = end
    for name in unread:
        raise UsageError(f"{name} is read by no phase and makes no difference; give it one value")
    if config.measure and not plans:
        if processes.count() > 1:
            raise UsageError("measure is for one process; set chunk and conv for several")
        phases = list(map(_measured, works, phases))
    return Built(tuple(phases), arrays, federation, task)


class _Work(NamedTuple):
    """What a phase's rounds are made from, but for their plan."""

    alike: Sequence[ConfigDict]  # the phase in each point of a sweep
    settings: Mapping[str, Sequence[float]]  # in which they differ
    words: configuration.Words
    task: Task
    arrays: data.FederatedData
    federation: Federation
    begin: int
    mesh: Mesh | None

    @property
    def cohort(self) -> int:
        return self.alike[0].clients_per_round or int(self.federation.active.sum())

    def points(self) -> Any:
        """What its rounds take as key."""
        if len(self.alike) == 1:
            return jax.random.key(self.alike[0].seed)
        return sweep.points([one.seed for one in self.alike], self.settings)

    def algorithm(self, conv: str, values: Mapping[str, Any] | None = None) -> Algorithm:
        """Of one point, the first where none is given: with numbers, or with what stands for all.

        With numbers of its own every point is checked.
        """
        make = partial(
            _algorithm,
            self.alike[0],
            self.words,
            self.task,
            self.arrays,
            self.federation,
            self.begin,
            conv,
        )
        if values is not None:
            return make(values)
        points = list(zip(*self.settings.values(), strict=True)) or [()]
        first, *_ = [make(dict(zip(self.settings, own, strict=True))) for own in points]
        return first

    def rounds(self, plan: Plan) -> Rounds:
        """Compiled when they are first called."""
        one = self.alike[0]
        plain = partial(
            plain_rounds,
            task=self.task,
            federation=self.federation,
            cohort=self.cohort,
            calls=boundary(one, self.begin, self.begin) - self.begin,
            dropout=one.dropout,
            max_update_norm=one.max_update_norm,
            after=one.evaluate_after,
            chunk=plan.chunk,
            mesh=self.mesh,
        )
        if len(self.alike) == 1:
            return compiled(plain(self.algorithm(plan.conv)), self.mesh)
        make = lambda values: plain(self.algorithm(plan.conv, values))
        return sweep.make_rounds(make, self.settings, self.mesh, _at_once(len(self.alike)))

    def short(self) -> "_Work":
        """With little local training, for trying how fast it is."""
        changed = [one.copy_and_resolve_references() for one in self.alike]
        for one in changed:
            one.local_epochs = None
            one.local_steps = min(plan.STEPS, one.local_steps or plan.STEPS)
        return self._replace(alike=changed)


def _measured(work: _Work, phase: Phase) -> Phase:
    """The phase by the plan that is fastest here, of those that its settings leave open."""
    one, usual = phase.config, phase.plan
    short = work.short()
    kind = plan.work(
        {
            "algorithm": one.algorithm,
            "model": [one.model, one.get(one.model, ConfigDict()).to_dict(), one.groups],
            "examples": work.federation.input_shape,
            "batch_size": one.batch_size,
            "cohort": work.cohort,
            "points": len(work.alike),
            "devices": work.mesh.size if work.mesh else 1,
            "open": [one.conv, one.chunk, usual.chunk],
        }
    )
    found = plan.kept(plan.folder(), kind)
    if found is None:
        most = -(-work.cohort // (work.mesh.size if work.mesh else 1))
        most = min(most, usual.chunk) if one.memory_gb is not None else most
        has_conv = any(
            hasattr(work.words.model[group.model], "conv")
            for group in configuration.groups(one, work.words)
        )
        found = plan.fastest(
            usual,
            [one.chunk] if one.chunk else plan.chunks(most),
            plan.LOWERINGS if has_conv and one.conv == "auto" else [one.conv],
            lambda tried: plan.timed(short.rounds(tried), phase.points, work.arrays),
        )
        plan.keep(plan.folder(), kind, found)
    return phase._replace(
        plan=found, rounds=work.rounds(found), algorithm=work.algorithm(found.conv)
    )


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
    conv: str,
    settings: Mapping[str, Any],
) -> Algorithm:
    """The phase's algorithm: one per group of architectures where there are groups.

    settings: values in the place of the configuration's, by name.
    """
    factory = words.algorithm[one.algorithm]
    value = lambda name: settings.get(name, one.get(name))
    ends = [begin + round(share * one.rounds) for share in one.learning_rate_drops]
    drops = np.asarray(ends, np.int32)
    rate = value("learning_rate")
    training = local.sgd(
        learning_rate=lambda t: rate * 0.1 ** jnp.sum(t >= drops).astype(jnp.float32),
        momentum=value("momentum"),
        weight_decay=value("weight_decay"),
        clip_norm=value("clip_norm"),
        batch_size=one.batch_size,
        epochs=None if one.local_steps else one.local_epochs or 1,
        steps=one.local_steps,
        keep_momentum=one.keep_momentum,
        begin=begin,
        rounds=one.rounds,
    )
    own = {
        name: settings.get(f"{one.algorithm}.{name}", setting)
        for name, setting in one.get(one.algorithm, ConfigDict()).to_dict().items()
    }
    each = configuration.groups(one, words)
    models = tuple(_model(words.model[g.model], g, federation, conv) for g in each)
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


def _model(factory: Any, one: ConfigDict, federation: Federation, conv: str) -> Any:
    """The network of a phase or group, if it can be built for these examples."""
    own = one.get(one.model, ConfigDict()).to_dict()
    if hasattr(factory, "conv"):
        own["conv"] = conv
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


def _with_room(work: _Work, recorded: Plan | None, before: Any) -> tuple[Plan, Rounds, Any]:
    """A phase's rounds, of as many clients at a time as memory_gb has room for; the state's shapes.

    Args:
      recorded: the plan of the run so far, where it goes on.
      before: the state's shapes at the end of the phase before.
    """
    one, clients = work.alike[0], work.federation.clients
    chosen = Plan(one.conv, one.chunk or _at_once(clients))
    if recorded and one.conv == "auto":
        chosen = chosen._replace(conv=recorded.conv, measured=recorded.measured)
    if recorded and not one.chunk:
        chosen = chosen._replace(chunk=recorded.chunk, measured=recorded.measured)
    rounds, key = work.rounds(chosen), jax.eval_shape(work.points)
    state = jax.eval_shape(rounds.init, key, before)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    if work.settings:  # what cannot be swept shows when it is traced
        jax.eval_shape(rounds.run, key, state, work.arrays, number, number)

    def needed(rounds: Rounds) -> float:
        """GB of a round or an evaluation, and of a checkpoint, which is a copy of the state."""
        run = memory.peak(rounds.run, key, state, work.arrays, number, number)
        evaluate = memory.peak(rounds.evaluate, key, state, work.arrays, number)
        return (_SLACK * max(run, evaluate) + memory.tree_bytes(state)) / 1e9

    while one.memory_gb is not None and (most := needed(rounds)) > one.memory_gb:
        if chosen.chunk == 1 or one.chunk:
            raise UsageError(
                f"with {chosen.chunk} of {clients} clients at a time this needs about {most:.3g} "
                f"GB, and memory_gb is {one.memory_gb}; take fewer clients, a smaller "
                f"{'chunk, ' if chosen.chunk > 1 else ''}model or batch_size"
            )
        chosen = chosen._replace(chunk=chosen.chunk // 2)
        rounds = work.rounds(chosen)
    return chosen, rounds, state


def _at_once(count: int) -> int:
    """On a CPU one client at a time fills a core; an accelerator wants them all together."""
    return 1 if jax.default_backend() == "cpu" else count


def boundary(one: ConfigDict, begin: int, now: int) -> int:
    """The round at which the host next has something to do."""
    every = [one.eval_every, *([one.checkpoint_every] if one.checkpoint_every else [])]
    return min(begin + one.rounds, *(now + e - (now - begin) % e for e in every))
