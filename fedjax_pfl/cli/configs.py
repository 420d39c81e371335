"""The flag --config: presets, configuration files and settings on the command line."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from fedjax_pfl import presets
from fedjax_pfl.cli.errors import in_one_line
from fedjax_pfl.core.errors import UsageError, nearest
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import settings_with


def define_config(options: flags.FlagValues, arguments: Sequence[str], system: str) -> None:
    """Adds the flags --config and --config.KEY to `options`, with a preset of `system` as default.

    `arguments` are as for `resolve_config`; absl reads the file and keys in them.
    """
    own = own_settings(arguments)
    for key in own:
        flags.DEFINE_string(f"config.{key}", None, "", flag_values=options)
    with in_one_line():
        config_flags.DEFINE_config_file(
            "config",
            str(presets.SYSTEMS[system].__file__),
            "SYSTEM:PRESET or FILE.py:PRESET, then --config.KEY=VALUE. Every KEY with its default "
            "and meaning: fedjax-pfl list settings, fedjax-pfl list methods.",
            flag_values=options,
            sys_argv=["", *(word for word in arguments if _key(word) not in own)],
        )


def define_data_dir(options: flags.FlagValues) -> "flags.FlagHolder[str | None]":
    """Adds --data_dir to `options` and returns its holder, from which absl reads the value."""
    return flags.DEFINE_string(
        "data_dir",
        None,
        "Folder of prepared tfds datasets. Default: TFDS_DATA_DIR.",
        flag_values=options,
    )


def read_settings(options: flags.FlagValues, arguments: Sequence[str]) -> ConfigDict:
    """Returns the settings of --config, changed by --config.KEY=VALUE and --data_dir.

    Settings that a user's file leaves out have their defaults. `options` are the parsed flags,
    `arguments` the command's arguments.
    """
    if not isinstance(options.config, ConfigDict):
        raise UsageError(
            f"get_config of {config_flags.get_config_filename(options['config'])} returns "
            f"{type(options.config).__name__}; it must return a ConfigDict"
        )
    with in_one_line():
        settings = options.config.copy_and_resolve_references().unlock()
    _add_defaults(settings, configuration.default())
    for key, value in own_settings(arguments).items():
        group, _, name = key.partition(".")
        if group not in settings:
            settings[group] = ConfigDict()
        settings[group][name] = _value(value)
    replace_alternatives(settings, arguments)
    if options.data_dir is not None:
        if "data_dir" in changed_settings(options):
            raise UsageError("--data_dir and --config.data_dir name the same folder; give one")
        settings.data_dir = options.data_dir
    return settings


def _add_defaults(settings: ConfigDict, defaults: ConfigDict) -> None:
    """Adds settings that are missing in `settings`, also in its groups, in place."""
    for name, value in defaults.items(preserve_field_references=True):
        if name not in settings:
            settings[name] = value
        elif isinstance(value, ConfigDict) and isinstance(settings[name], ConfigDict):
            _add_defaults(settings[name], value)


def changed_settings(options: flags.FlagValues) -> dict[str, object]:
    """Returns the values given as --config.KEY=VALUE, by KEY such as "pfedla.rate"."""
    return config_flags.get_override_values(options["config"])


def resolve_config(arguments: Sequence[str], default: str) -> list[str]:
    """Returns the arguments with SYSTEM of --config=SYSTEM:PRESET replaced by its file's path.

    Raises a UsageError if there is no such system or file. For --config=PRESET the message suggests
    `default`, the command's own system.
    """
    resolved = list(arguments)
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.lstrip("-") != "config" or not flag.startswith("-"):
            continue
        position = i if equals else i + 1
        value = value if equals else "".join(arguments[position : position + 1])
        name, colon, preset = value.partition(":")
        if name in presets.SYSTEMS:
            path = presets.SYSTEMS[name].__file__
            resolved[position] = f"{flag}=" * bool(equals) + f"{path}{colon}{preset}"
        elif not Path(name).is_file():
            raise UsageError(
                f"there is no configuration {name!r}; --config takes SYSTEM:PRESET or "
                f"FILE.py:PRESET; {_nearest_config(name, colon + preset, default)}"
            )
    return resolved


def _nearest_config(name: str, preset: str, default: str) -> str:
    """Returns a hint for a missing configuration, such as "did you mean pfedla:digits?".

    `name` is the system or file before the colon; `preset` is the colon and the rest, or "".
    `default` is the system to suggest if `name` may be a preset.
    """
    is_path = "/" in name or name.endswith(".py")
    files = {path.stem: str(path) for path in Path(name).parent.glob("[!_]*.py")} if is_path else {}
    candidates = {**files, **{system: system for system in presets.SYSTEMS}}
    if match := nearest(Path(name).stem, candidates):
        return f"did you mean {candidates[match]}{preset}?"
    if not name or preset or is_path:
        return f"systems are {', '.join(presets.SYSTEMS)}"
    return f"did you mean {default}:{name}?"


def check_keys(arguments: Sequence[str]) -> None:
    """Raises a UsageError with the nearest name if a KEY of --config.KEY=VALUE does not exist."""
    defaults, own = configuration.default(), own_settings(arguments)
    for argument in arguments:
        path = argument.lstrip("-").partition("=")[0]
        if not path.startswith("config.") or _key(argument) in own:
            continue
        level, prefix = defaults, ""
        for word in path.removeprefix("config.").split("."):
            is_group, key = isinstance(level, ConfigDict), word.partition("[")[0]
            if not is_group or key not in level:
                hint = configuration.setting_hint(key, level, prefix) if is_group else ""
                raise UsageError(f"there is no setting {prefix}{key}{hint}")
            if key != word:  # an entry of a tuple, such as phases[0]
                break
            level, prefix = level[key], f"{prefix}{key}."


def own_settings(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the text of --config.NAME.KEY=VALUE by NAME.KEY, for components of the user.

    They are those that a flag such as --config.algorithm=MODULE:NAME selects.
    """
    pairs = [
        (flag.removeprefix("config."), value)
        for flag, value in flag_values(arguments)
        if flag.startswith("config.")
    ]
    paths = [value for key, value in pairs if key != "dataset"]  # which may be csv:FILE
    names = {path.rpartition(":")[2] for path in paths if ":" in path}
    names -= set(configuration.default())
    return {key: value for key, value in pairs if "." in key and key.partition(".")[0] in names}


def _key(argument: str) -> str:
    """Returns KEY of --config.KEY=VALUE or of --config.KEY, and other flags without dashes."""
    return argument.lstrip("-").partition("=")[0].removeprefix("config.")


def _value(text: str) -> Any:
    """Returns the Python value that a text such as 0.5, True or (8, 16) writes, or the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def flag_values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (FLAG, VALUE) for each --FLAG=VALUE or --FLAG VALUE; VALUE is "" if there is none."""
    left = list(arguments)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        if not equals and left and not left[0].startswith("--"):
            value = left.pop(0)
        yield flag.lstrip("-"), value


def replace_alternatives(settings: ConfigDict, arguments: Sequence[str]) -> None:
    """Unsets one of two settings that exclude each other if `arguments` set only the other.

    They are `local_steps` and `local_epochs`, and `validation_fraction` and `validation_examples`.
    """
    changed = {flag.removeprefix("config.") for flag, _ in flag_values(arguments)}
    for name, replaced, unset in (
        ("local_steps", "local_epochs", None),
        ("local_epochs", "local_steps", None),
        ("validation_fraction", "validation_examples", None),
        ("validation_examples", "validation_fraction", 0.0),
    ):
        if name in changed and replaced not in changed:
            settings[replaced] = unset


def default_workdir(name: str, arguments: Sequence[str]) -> str:
    """Returns runs/NAME-PRESET-KEY=VALUE-... for a command and its --config flags, shortened.

    Settings that may change when a run is resumed are left out, so that it finds its directory.
    """
    parts, resumable = [name], settings_with("resumable")
    for flag, value in flag_values(arguments):
        if flag == "config" and ":" in value:
            parts.insert(1, value.rpartition(":")[2])
        elif flag.startswith(("config.", "noconfig.")) and flag.partition(".")[2] not in resumable:
            key = flag.replace("config.", "", 1)
            parts.append(f"{key}={value}" if value else key)
    directory = "".join(c if c.isalnum() or c in "-_.=," else "_" for c in "-".join(parts))
    return str(Path("runs") / directory[:150])
