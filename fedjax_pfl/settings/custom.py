"""What a caller brings for one run: examples, a method, a network, a task that are not ours."""

import functools
import hashlib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import numpy as np
import optax

from fedjax_pfl.core import optimizers
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.numbers import in_parts
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.configuration import BUILTINS, Registry
from fedjax_pfl.settings.own_networks import name_of, own_network

Factory = Callable[..., Any]
_USUAL = {"algorithm": "fedavg", "task": "classification"}
_TAKES = {"algorithm": ("model", "training", "federation"), "task": ("outputs",)}


class UserComponents(TypedDict, total=False):
    """What a caller can bring, by the argument of `fedjax_pfl.run` that it is."""

    dataset: Dataset | None
    algorithm: Factory | None
    model: Any
    task: Factory | None
    optimizer: optax.GradientTransformation | None
    server_optimizer: optax.GradientTransformation | None


def added(
    given: Mapping[str, Any],
    *,
    dataset: Dataset | None = None,
    algorithm: Factory | None = None,
    model: Any = None,
    task: Factory | None = None,
    optimizer: optax.GradientTransformation | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
) -> tuple[Registry, dict[str, Any]]:
    """The library's words and these, and the configuration with their names.

    All but the examples may be named in the configuration instead, as MODULE:NAME.
    """
    if not isinstance(given, Mapping):
        raise UsageError(
            f"settings are a mapping, such as {{'algorithm': 'fedavg'}}, not {given!r}"
        )
    words, given = BUILTINS, dict(given)
    if dataset is not None:
        if not isinstance(dataset, Dataset):
            raise UsageError("dataset must be what fedjax_pfl.arrays(x, y) makes")
        name = _free("dataset", dataset.name, "arrays(..., name=...)")
        if given.setdefault("dataset", name) != name:
            raise UsageError(
                f"the configuration says dataset={given['dataset']!r}, and examples called "
                f"{name!r} are given too; leave one of them out"
            )
        words = words._replace(dataset={**words.dataset, name: _source(dataset)})
    brought: dict[str, Any] = {"algorithm": algorithm, "model": model, "task": task}
    steps = {"optimizer": optimizer, "server_optimizer": server_optimizer}
    for kind in (*brought, *steps):
        if not isinstance(given.get(kind, ""), str):
            raise UsageError(
                f"{kind} in the settings is a name, not {given[kind]!r}; what is your own comes by "
                f"an argument, as run(settings, {kind}=...)"
            )
    for kind, one in brought.items():
        said = given.get(kind)
        if isinstance(said, str) and ":" in said:
            if one is not None:
                raise UsageError(f"{kind} is {said!r}, and {kind}= is given too; leave one out")
            one = _imported(kind, said)
            given.pop(kind)
        if one is None:
            continue
        if kind != "model" and not callable(one):
            raise UsageError(
                f"{kind}= brings a function, not {one!r}; ours go by their names in the settings, "
                f"as {{{kind!r}: {_USUAL[kind]!r}}}"
            )
        name = _free(kind, name_of(one), "another name of the function or class")
        content = _source_digest(one)
        if kind == "model":
            factory = own_network(name, one, content)
        else:
            _check_factory(name, one, _TAKES[kind])
            factory = _versioned(name, one, content)
        given.setdefault(kind, name)
        # One call with a method and its name in turn makes the runs of a comparison; a network or a
        # task that is not used is a mistake.
        if kind != "algorithm" and name not in _chosen(kind, given):
            raise UsageError(
                f"the configuration says {kind}={given[kind]!r}, and {kind}= brings {name}, which "
                "it would not use; leave one of them out"
            )
        words = words._replace(**{kind: {**getattr(words, kind), name: factory}})
    for kind, one in steps.items():
        if one is not None:
            name, make = _optimizer(kind, one)
            if given.setdefault(kind, name) != name:
                raise UsageError(
                    f"the configuration says {kind}={given[kind]!r}, and {kind}= brings another "
                    "optimiser; leave one of them out"
                )
            words = words._replace(**{kind: {**getattr(words, kind), name: make}})
    return words, given


def _chosen(kind: str, given: Mapping[str, Any]) -> list[Any]:
    """What a configuration names, for itself and for its phases, which are not yet validated."""
    listed = given.get("phases")
    phases = listed if isinstance(listed, (list, tuple)) else ()
    return [one[kind] for one in (given, *phases) if isinstance(one, Mapping) and kind in one]


def _imported(kind: str, said: str) -> Any:
    """What MODULE:NAME names."""
    module, _, name = said.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{kind} is {said!r}, MODULE:NAME, and cannot be had: {line}") from None


def _optimizer(kind: str, brought: Any) -> tuple[str, Callable[..., Any]]:
    """A caller's optimiser by a name that says what it is made of."""
    if not isinstance(brought, optax.GradientTransformation):
        raise UsageError(
            f"{kind}= brings what optax makes, such as optax.adamw(1e-3), not {brought!r}; ours go "
            f"by their names in the settings, as {{{kind!r}: 'adam'}}"
        )
    optimizers.check(f"{kind}=", brought, _SOME)
    whole = optimizers.with_rate if kind == "optimizer" else optimizers.with_dtype_promotion

    def made(value_of: Callable[[str], Any]) -> optax.GradientTransformation:
        return whole(brought)

    return f"own-{hashlib.sha256(_inside(brought).encode()).hexdigest()[:16]}", made


# Parameters of no network, with which is seen what an optimiser needs.
_SOME = {"layer": {"kernel": np.zeros((2, 3), np.float32), "bias": np.zeros(3, np.float32)}}


def _inside(value: Any) -> str:
    """What a value is made of, functions with all that they close over."""
    if isinstance(value, functools.partial):
        return _inside((value.func, value.args, value.keywords))
    if inspect.isfunction(value):
        closed = [_inside(_content(cell)) for cell in value.__closure__ or ()]
        usual = _inside((value.__defaults__, value.__kwdefaults__))
        return f"{value.__module__}.{value.__qualname__}{_compiled(value.__code__)}{closed}{usual}"
    if isinstance(value, Mapping):
        return f"{[(repr(key), _inside(one)) for key, one in value.items()]}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[_inside(one) for one in value]}"
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return f"{value.dtype}{np.asarray(value).tobytes()!r}"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"  # whose address tells nothing


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _free(kind: str, name: str, how: str) -> str:
    """A name for one of a kind that is no setting's and no other thing's."""
    if not str(name).isidentifier():
        raise UsageError(f"{name!r} cannot name the {kind} in a configuration; use {how}")
    taken = next((k for k, table in BUILTINS._asdict().items() if name in table), None)
    if taken or name in configuration.default():
        what = f"one of ours ({taken})" if taken else "a setting"
        raise UsageError(f"{name!r} is the name of {what} already; use {how}")
    return name


def digest(dataset: Dataset) -> str:
    """Of everything that is in it but its name."""
    found = hashlib.sha256()
    for field in dataset._fields[1:]:
        value = getattr(dataset, field)
        if value is not None:
            records = isinstance(value, tuple | Mapping)
            array = np.asarray(repr(value) if records else value)
            shape = array.shape or (1,)
            found.update(f"{field}{array.dtype}{shape}".encode())
            for part in in_parts(array):
                found.update(part.tobytes())
    return found.hexdigest()[:16]


def _source(dataset: Dataset) -> Callable[..., Dataset]:
    """The examples as a source, whose setting `digest` stands in the configuration of a run."""
    content = digest(dataset)

    def source(data_dir: Any, keep: Any, *, digest: str = content) -> Dataset:
        if digest != content:
            raise UsageError(
                f"{dataset.name}.digest is {digest}, and that of the examples given is {content}: "
                "they are others"
            )
        if keep(len(dataset.x_train)) is not None:
            raise UsageError("fraction is for datasets by name; give fewer examples instead")
        return dataset

    return source


def _source_digest(brought: Any) -> str:
    """A digest of the code of a function or a class, or of a module's class and its fields.

    It is of the text alone. Functions that this text calls, values that it closes over and the
    library may change without another digest.
    """
    one = brought if hasattr(brought, "__name__") else type(brought)
    code = getattr(inspect.unwrap(one) if callable(one) else one, "__code__", None)
    try:
        # From 3.13 on Python takes the whole of what stands behind -c for the source of these.
        if code is not None and code.co_filename == "<string>":
            raise OSError
        text = inspect.getsource(one)
    except (OSError, TypeError):  # typed in, or no function
        parts = [one, *vars(one).values()] if inspect.isclass(one) else [one]
        codes = [
            getattr(inspect.unwrap(part), "__code__", None) for part in parts if callable(part)
        ]
        text = "".join(_compiled(code) for code in codes if code is not None)
    if one is not brought:  # what a module was made with, but for where functions lie
        text += re.sub(" at 0x[0-9a-f]+", "", repr(brought))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _versioned(name: str, factory: Factory, content: str) -> Factory:
    """The factory with one more setting, `digest`: in a configuration it says which code it is."""

    @functools.wraps(factory)
    def known(*arguments: Any, digest: str = content, **settings: Any) -> Any:
        if digest != content:
            raise UsageError(
                f"{name}.digest is {digest}, and that of the function given is {content}: its "
                "code is another"
            )
        return factory(*arguments, **settings)

    signature = inspect.signature(factory)
    more = inspect.Parameter("digest", inspect.Parameter.KEYWORD_ONLY, default=content)
    ordered = sorted([*signature.parameters.values(), more], key=_kind)
    known.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    known.__annotations__ = {**typing.get_type_hints(factory), "digest": str}
    return known


def _kind(parameter: inspect.Parameter) -> int:
    return parameter.kind


def _compiled(code: types.CodeType) -> str:
    inner = [_constant(constant) for constant in code.co_consts]
    return f"{code.co_code!r}{code.co_names}{code.co_varnames}{inner}"


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _compiled(value)
    # The order in a set is another one in each process.
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _check_factory(name: str, factory: Factory, takes: tuple[str, ...]) -> None:
    """Raise UsageError where a configuration could not hold its settings."""
    parameters = inspect.signature(factory).parameters
    try:
        inspect.signature(factory).bind(*takes)
    except TypeError:
        raise UsageError(
            f"{name} must take ({', '.join(takes)}), and settings of its own by keyword, each "
            "with a default"
        ) from None
    if "digest" in parameters:
        raise UsageError(f"{name} has a setting digest, which stands for its code; rename it")
    hints = typing.get_type_hints(factory)
    own = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    if untyped := [p.name for p in own if p.name not in hints]:
        raise UsageError(
            f"{name} must give its setting {untyped[0]} a type, as in beta: float = 0.9"
        )
    for one in own:
        if not _can_be_held(one.default, hints[one.name]):
            kind = type(one.default).__name__
            raise UsageError(
                f"{name}: no configuration can hold {kind} as the default of {one.name}; use "
                "numbers, text, true and false or tuples of them, or None with the type that it "
                "may have, as in beta: float | None = None"
            )


def _can_be_held(value: Any, hint: Any) -> bool:
    """Whether a configuration can have it as a default, and be written down with it."""
    if value is None:
        return any(isinstance(kind, type) for kind in _kinds(hint))
    if isinstance(value, tuple):
        return all(_can_be_held(one, type(one)) for one in value)
    return isinstance(value, bool | int | float | str)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """What beside None an annotation such as float | None lets a setting be."""
    return tuple(kind for kind in typing.get_args(hint) if kind is not type(None))
