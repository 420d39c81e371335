"""User-defined components of one run: examples, a method, a network, a task, optimisers."""

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
from fedjax_pfl.core.errors import UsageError, first_line, require
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.numbers import row_chunks
from fedjax_pfl.networks.user_networks import (
    as_float,
    is_plain,
    object_name,
    user_network,
)
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.configuration import BUILTINS, Registry

Factory = Callable[..., Any]
_EXAMPLE_NAMES = {"algorithm": "fedavg", "task": "classification"}
_ARGUMENTS = {"algorithm": ("model", "training", "federation"), "task": ("outputs",)}


class UserComponents(TypedDict, total=False):
    """User-defined components, by argument of `fedjax_pfl.run`, which describes them."""

    dataset: Dataset | None
    algorithm: Factory | None
    model: Any
    task: Factory | None
    optimizer: optax.GradientTransformation | None
    server_optimizer: optax.GradientTransformation | None


def register(
    settings: Mapping[str, Any],
    *,
    dataset: Dataset | None = None,
    algorithm: Factory | None = None,
    model: Any = None,
    task: Factory | None = None,
    optimizer: optax.GradientTransformation | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
) -> tuple[Registry, dict[str, Any]]:
    """Adds user-defined components, see `fedjax_pfl.run`, to the built-in ones.

    The settings, in nested dicts, may name a method, network or task as MODULE:NAME, which is
    imported. Returns the registry with these components, and a copy of the settings that selects
    them by name. Raises UsageError for a component of another type, or one that the settings
    contradict.
    """
    if not isinstance(settings, Mapping):
        raise UsageError(
            f"settings must be a mapping, such as {{'algorithm': 'fedavg'}}, got {settings!r}"
        )
    registry, settings = BUILTINS, dict(settings)
    if dataset is not None:
        if not isinstance(dataset, Dataset):
            raise UsageError("dataset= must be a Dataset, such as fedjax_pfl.arrays(x, y)")
        name = _check_name("dataset", dataset.name, "arrays(..., name=...)")
        if settings.setdefault("dataset", name) != name:
            raise UsageError(
                f"the settings select dataset={settings['dataset']!r}, and dataset= passes "
                f"{name!r}; leave one out"
            )
        registry = registry._replace(dataset={**registry.dataset, name: _source(dataset)})
    components: dict[str, Any] = {"algorithm": algorithm, "model": model, "task": task}
    optimizers_by_kind = {"optimizer": optimizer, "server_optimizer": server_optimizer}
    for kind in (*components, *optimizers_by_kind):
        if not isinstance(settings.get(kind, ""), str):
            raise UsageError(
                f"{kind} in the settings must be a name, got {settings[kind]!r}; pass your own as "
                f"an argument: run(settings, {kind}=...)"
            )
    for kind, component in components.items():
        registry = _register_factory(registry, settings, kind, component)
    for kind, transformation in optimizers_by_kind.items():
        if transformation is not None:
            name, create = _optimizer(kind, transformation)
            settings.setdefault(kind, name)
            if not _is_selected(kind, name, settings):
                raise UsageError(
                    f"the settings select {kind}={settings[kind]!r}, and {kind}= passes another "
                    "optimiser; leave one out"
                )
            registry = registry._replace(**{kind: {**getattr(registry, kind), name: create}})
    return registry, settings


def _register_factory(
    registry: Registry, settings: dict[str, Any], kind: str, component: Any
) -> Registry:
    """Returns the registry with a method, network or task, and adds its name to the settings.

    `kind` is "algorithm", "model" or "task". If `component` is None, the settings may name it as
    MODULE:NAME; if they do not, the registry is returned unchanged. Raises UsageError if it is not
    callable, or the settings select another one.
    """
    path = settings.get(kind)
    if isinstance(path, str) and ":" in path:
        if component is not None:
            raise UsageError(f"{kind} is {path!r}, and {kind}= is given too; leave one out")
        component = _imported(kind, path)
        settings.pop(kind)
    if component is None:
        return registry
    if kind != "model" and not callable(component):
        raise UsageError(
            f"{kind}= must be a function, got {component!r}; select a built-in in the settings: "
            f"{{{kind!r}: {_EXAMPLE_NAMES[kind]!r}}}"
        )
    name = _check_name(kind, object_name(component), "another name of the function or class")
    digest = _source_digest(component)
    if kind == "model":
        component = user_network(name, component, digest)
    else:
        _check_factory(name, component, _ARGUMENTS[kind])
    factory = _with_digest(name, component, digest)
    settings.setdefault(kind, name)
    # A comparison passes one method and selects it or a built-in one in turn. A network or a task
    # that no phase uses is a mistake.
    if kind != "algorithm" and not _is_selected(kind, name, settings):
        raise UsageError(
            f"the settings select {kind}={settings[kind]!r}, and {kind}= passes {name}; leave one "
            "out"
        )
    return registry._replace(**{kind: {**getattr(registry, kind), name: factory}})


def _is_selected(kind: str, name: str, settings: Mapping[str, Any]) -> bool:
    """Returns True if the settings, which are not validated, select a component in any phase."""
    phases = settings.get("phases")
    phases = phases if isinstance(phases, (list, tuple)) and phases else ({},)
    return name in [p.get(kind, settings[kind]) for p in phases if isinstance(p, Mapping)]


def _imported(kind: str, path: str) -> Any:
    """Returns the object at `path`, MODULE:NAME; `kind` is the setting, for the error message.

    Raises UsageError if it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a module is code and can raise anything
        problem = f"{kind} is {path!r}, MODULE:NAME, and cannot be loaded: {first_line(error)}"
        raise UsageError(problem) from None


def _optimizer(kind: str, optimizer: Any) -> tuple[str, Callable[..., Any]]:
    """Returns a name for an optax optimiser, made from its content, and a factory that returns it.

    `kind` is "optimizer" (of the clients) or "server_optimizer". The factory ignores its argument.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise UsageError(
            f"{kind}= must be an optax optimiser, such as optax.adamw(1e-3), got {optimizer!r}; "
            f"select a built-in in the settings: {{{kind!r}: 'adam'}}"
        )
    optimizers.check(f"{kind}=", optimizer)
    adapt = optimizers.with_rate if kind == "optimizer" else optimizers.with_dtype_promotion

    def create(value_of: Callable[[str], Any]) -> optax.GradientTransformation:
        return adapt(optimizer)

    return f"own-{hashlib.sha256(_content(optimizer).encode()).hexdigest()[:16]}", create


def _content(value: Any, outer: tuple[Any, ...] = ()) -> str:
    """Returns a value's content as text; a function's with its code and all it closes over.

    An object's content is its type and attributes. `outer` has the values that contain this one.
    """
    if any(value is container for container in outer):
        return "a value that contains it"

    def content(part: Any) -> str:
        return _content(part, (*outer, value))

    if isinstance(value, functools.partial):
        return content((value.func, value.args, value.keywords))
    if inspect.ismethod(value):
        return content((value.__func__, value.__self__))
    if inspect.isfunction(value):
        closed = [content(_cell_contents(cell)) for cell in value.__closure__ or ()]
        defaults = content((value.__defaults__, value.__kwdefaults__))
        code = _code_text(value.__code__)
        return f"{value.__module__}.{value.__qualname__}{code}{closed}{defaults}"
    if isinstance(value, Mapping):
        return f"{[(repr(key), content(item)) for key, item in value.items()]}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[content(item) for item in value]}"
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return f"{value.dtype}{np.asarray(value).tobytes()!r}"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, set | frozenset):  # their order differs between processes
        return f"{type(value).__name__}{sorted(map(content, value))}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if attributes := getattr(value, "__dict__", {}):
        return f"{name}{content(attributes)}"
    text = repr(value)  # of some objects with their address, which differs between processes
    return name if "0x" in text else f"{name}{text}"


def _cell_contents(cell: Any) -> Any:
    """Returns the value in a cell of a closure, or None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _check_name(kind: str, name: str, advice: str) -> str:
    """Returns `name`; raises UsageError if it is no identifier, or a built-in or setting has it.

    `kind` is the component's, such as "model"; `advice` ends the message after "use".
    """
    if not str(name).isidentifier():
        raise UsageError(f"{name!r} cannot name the {kind} in a configuration; use {advice}")
    owner_kind = next((k for k, table in BUILTINS._asdict().items() if name in table), None)
    if owner_kind or name in configuration.default():
        owner = f"a built-in {owner_kind}" if owner_kind else "a setting"
        raise UsageError(f"{name!r} is the name of {owner} already; use {advice}")
    return name


def dataset_digest(dataset: Dataset) -> str:
    """Returns 16 hexadecimal digits, a digest of all fields of a dataset except its name."""
    sha = hashlib.sha256()
    for field in dataset._fields[1:]:
        value = getattr(dataset, field)
        if value is not None:
            is_record = isinstance(value, tuple | Mapping)
            array = np.asarray(repr(value) if is_record else value)
            shape = array.shape or (1,)
            sha.update(f"{field}{array.dtype}{shape}".encode())
            for part in row_chunks(array):
                sha.update(part.tobytes())
    return sha.hexdigest()[:16]


def _source(dataset: Dataset) -> Callable[..., Dataset]:
    """Returns a factory (sample_rows, *, digest) that returns this dataset.

    It raises UsageError if the examples have another digest than `digest`, or if
    `sample_rows(number)`, which selects a fraction of `number` rows, does not return None.
    """
    content = dataset_digest(dataset)

    def source(sample_rows: Any, *, digest: str = content) -> Dataset:
        require(
            digest == content,
            f"{dataset.name}.digest is {digest}, but the examples have {content}; use the "
            "examples of the configuration",
        )
        if sample_rows(len(dataset.x_train)) is not None:
            raise UsageError("fraction is for datasets by name; give fewer examples instead")
        return dataset

    return source


def _source_digest(component: Any) -> str:
    """Returns a digest of the source of a function, of a class, or of an object's class and fields.

    It covers the source text alone: functions that it calls, values that it closes over and the
    library may change without changing the digest.
    """
    definition = component if hasattr(component, "__name__") else type(component)
    try:
        # From Python 3.13 on, inspect returns the whole argument of `python -c` for these.
        code = _code_of(definition)
        if code is not None and code.co_filename == "<string>":
            raise OSError
        text = inspect.getsource(definition)
    except (OSError, TypeError):  # defined interactively, or no function
        parts = [definition, *(vars(definition).values() if inspect.isclass(definition) else ())]
        text = "".join(_code_text(code) for code in map(_code_of, parts) if code is not None)
    if definition is not component:  # the fields of a module, without addresses of functions
        text += re.sub(" at 0x[0-9a-f]+", "", repr(component))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code_of(value: Any) -> types.CodeType | None:
    """Returns the code of a function, or None for anything else."""
    return getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None


def _with_digest(name: str, factory: Callable[..., Any], content: str) -> Factory:
    """Returns `factory` with one more setting, `digest`, whose default is `content`.

    `content` is the digest of its code. The new factory raises UsageError if `digest` differs.
    `name` is the name of the factory, for messages.
    """
    signature = inspect.signature(factory)
    if "digest" in signature.parameters:
        raise UsageError(f"{name} has a setting digest, a reserved name; rename it")

    @functools.wraps(factory)
    def wrapper(*arguments: Any, digest: str = content, **settings: Any) -> Any:
        require(
            digest == content,
            f"{name}.digest is {digest}, but the code has {content}; use the code of the "
            "configuration",
        )
        return factory(*arguments, **settings)

    parameter = inspect.Parameter("digest", inspect.Parameter.KEYWORD_ONLY, default=content)
    hints = {**typing.get_type_hints(factory), "digest": str}
    typed = [
        p.replace(default=as_float(p.default, hints.get(p.name)))
        for p in (*signature.parameters.values(), parameter)
    ]
    ordered = sorted(typed, key=lambda p: p.kind)
    wrapper.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    wrapper.__annotations__ = hints
    return wrapper


def _code_text(code: types.CodeType) -> str:
    """Returns bytecode, names and constants as text that is the same in every process."""
    constants = [_constant_text(constant) for constant in code.co_consts]
    return f"{code.co_code!r}{code.co_names}{code.co_varnames}{constants}"


def _constant_text(value: Any) -> str:
    """Returns a constant of bytecode as text that is the same in every process."""
    if isinstance(value, types.CodeType):
        return _code_text(value)
    # The order of a set differs between processes.
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _check_factory(name: str, factory: Factory, arguments: tuple[str, ...]) -> None:
    """Raises UsageError for a factory with wrong arguments or with settings of unusable types.

    `arguments` are the names of the positional arguments that the library passes.
    """
    try:
        signature = inspect.signature(factory)
        signature.bind(*arguments)
    except (TypeError, ValueError):  # some built-in classes have no signature
        raise UsageError(
            f"{name} must take ({', '.join(arguments)}), and its settings by keyword, each with a "
            "default"
        ) from None
    try:
        hints = typing.get_type_hints(factory)
    except TypeError:  # such as functools.partial
        raise UsageError(f"{name} is no function; write a function that calls it") from None
    except NameError as error:
        raise UsageError(
            f"the types of the arguments of {name} cannot be read ({first_line(error)}); import "
            "them where the function is defined, also at run time"
        ) from None
    settings = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    if untyped := [p.name for p in settings if p.name not in hints]:
        raise UsageError(
            f"{name} must give its setting {untyped[0]} a type, as in beta: float = 0.9"
        )
    reserved = configuration.PASSED - configuration.SCHEDULE_ARGUMENTS
    for setting in settings:
        if setting.name in reserved:
            raise UsageError(f"{name} has a setting {setting.name}, a reserved name; rename it")
        if not _is_storable(setting.default, hints[setting.name]):
            kind = type(setting.default).__name__
            raise UsageError(
                f"{name}: no configuration can hold {kind} as the default of {setting.name}; use a "
                "number, a string, a bool or a tuple of these, or None with a type, as in beta: "
                "float | None = None"
            )


def _is_storable(value: Any, hint: Any) -> bool:
    """Returns True if a configuration can store `value`, the default of a setting.

    None can be stored if `hint`, the annotation, has a type besides.
    """
    if value is None:
        kinds = (kind for kind in typing.get_args(hint) if kind is not type(None))
        return any(isinstance(kind, type) for kind in kinds)
    return is_plain(value)
