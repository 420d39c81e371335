"""The command fedjax-pfl tune."""

import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags, config_path

from fedjax_pfl.cli.command import Call, Command, check_no_positional
from fedjax_pfl.cli.configs import (
    changed_settings,
    define_data_dir,
    read_settings,
    replace_alternatives,
)
from fedjax_pfl.cli.errors import in_one_line
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import interrupt
from fedjax_pfl.runs.tuning import search, trials
from fedjax_pfl.settings import configuration, selection
from fedjax_pfl.settings.configuration import ALGORITHMS
from fedjax_pfl.simulation.devices import prepare_devices

HELP = """
fedjax-pfl tune --config=pfedla:digits --config.validation_fraction=.2 \\
    --methods=pfedla,fedavg,local --rounds=20 --seeds=2 \\
    --grid="learning_rate=.1,.03,.01" --grid="pfedla.rate=.2,.5; pfedla.embedding=50,100" \\
    --budget=3 --out=runs/tune/digits

A key of a grid is a training setting, for all methods, or METHOD.SETTING, for one method: a setting
of the method, or a training setting with other values for it. Values are numbers, words, true,
false or unset. All combinations are tried, or --budget of them for each method. Seeds and the
settings that config.sweep takes share a compiled program. Every value of another setting needs a
program of its own, and so does 0 for momentum or weight_decay.

The point with the highest validation accuracy is chosen: the mean over clients at a run's best
evaluation, averaged over seeds. Among equals the first in the grid is chosen. Test examples are not
used.

The folder --out gets the runs, tables, a picture, a page and tuned.py, a configuration file with a
preset for each method: --config=FOLDER/tuned.py:METHOD. Give the same command again to resume;
finished runs are only read, also with another grid.
"""


def define_flags(options: flags.FlagValues) -> None:
    """Adds the flags of the command to `options`, except --config."""
    count = partial(flags.DEFINE_integer, lower_bound=1, flag_values=options)
    define_data_dir(options)
    flags.DEFINE_list(
        "methods", [], "Methods to tune. Default: that of the configuration.", flag_values=options
    )
    flags.DEFINE_multi_string(
        "grid", [], "KEY=VALUE,VALUE; METHOD.KEY=VALUE,VALUE", flag_values=options
    )
    count(
        "budget",
        None,
        "Points to sample from the grid of each method. Default: all, equally many for each.",
    )
    flags.DEFINE_integer(
        "budget_seed", 0, "Seed of that sampling.", lower_bound=0, flag_values=options
    )
    count("seeds", None, "Number of seeds, from config.seed on. Default: config.seeds.")
    count(
        "rounds",
        None,
        "Rounds of the first method's runs, with all phases; others are shortened in proportion.",
    )
    count("runs_per_program", None, "Largest number of runs in one program. Default: all.")
    flags.DEFINE_string(
        "out", "runs/tune", "Folder of the runs, tables and tuned.py.", flag_values=options
    )
    flags.DEFINE_bool(
        "only_show", False, "Print what has been computed and run nothing.", flag_values=options
    )
    flags.DEFINE_enum(
        "format", "text", list(search.FORMATS), "Format of the output.", flag_values=options
    )


def configure_methods(
    source: str, base: ConfigDict, changes: Mapping[str, Any], methods: Sequence[str]
) -> dict[str, ConfigDict]:
    """Returns the configuration of each method, by name. Missing settings have their defaults.

    If the file has a preset PRESET-METHOD, as the library's files have, it is the configuration of
    the method; a word of PRESET that is for another method is left out. Otherwise it is `base` with
    another `algorithm`. `source` is FILE.py:PRESET, the value of --config. `base` has the values of
    --config.KEY=VALUE; these `changes` apply to all.
    """
    configs = {}
    for method in methods:
        preset = None if method == base.algorithm else _method_preset(source, method)
        with in_one_line():
            config = configuration.complete((base if preset is None else preset).to_dict())
            if preset is not None:
                for path, value in changes.items():
                    config_path.set_value(path, config, value)
        if preset is not None:
            replace_alternatives(config, [f"--config.{path}=" for path in changes])
            config.data_dir = base.data_dir
        config.algorithm = method
        configs[method] = config
    return configs


def _method_preset(source: str, method: str) -> ConfigDict | None:
    """Returns the preset PRESET-METHOD for `source`, FILE.py:PRESET, or None if there is none.

    If it is refused, the word that the refusal names is left out. Raises UsageError if none helps.
    """
    path, _, preset = source.partition(":")
    try:
        spec = importlib.util.spec_from_file_location("presets_to_tune", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        default = next(iter(inspect.signature(module.get_config).parameters.values())).default
        other_words = [word for word in str(preset or default).split("-") if word not in ALGORITHMS]
    except Exception:  # a configuration file is code and can raise anything
        return None
    refusal = UsageError(f"there is no preset of {method}")
    for left_out in ("", *other_words):
        if left_out not in ("", *re.findall(r"[\w.]+", str(refusal).partition("': ")[2])):
            continue  # the refusal does not name this word
        kept_words = [word for word in other_words if word and word != left_out]
        try:
            config = module.get_config("-".join([*kept_words, method]))
            return config if config.algorithm == method else None
        except UsageError as error:
            refusal = refusal if left_out else error
        except Exception:
            return None
    raise refusal


def tune(call: Call) -> None:
    """Trains methods with points of their grids, up to --budget each; prints and writes the tables.

    A point is one value for each key of --grid.
    """
    options = call.options
    check_no_positional(call)
    base = read_settings(options, call.arguments)
    if options.budget is None and options["budget_seed"].present:
        raise UsageError("--budget_seed has no effect without --budget; leave it out")
    if base.sweep:
        raise UsageError("give the values to try as --grid instead of sweep")
    prepare_devices()
    methods = search.check_methods(options.methods or [base.algorithm])
    source = config_flags.get_config_filename(options["config"])
    changes = changed_settings(options)
    configs = configure_methods(source, base, changes, methods)
    selection.check_used(selection.nested(changes), list(configs.values()))
    plan = search.plan(
        configs,
        options.grid,
        options.rounds,
        options.budget,
        options.budget_seed,
        as_preset=not set(trials.PARTICIPATION) & set(changes),
    )
    with interrupt.on_signals() as stop:
        search.run_search(
            plan,
            seeds=options.seeds or base.seeds,
            out=Path(options.out),
            texts=options.grid,
            budget=options.budget,
            max_runs=options.runs_per_program,
            only_show=options.only_show,
            form=options.format,
            stop=stop,
        )


COMMANDS = {"tune": Command(lambda: HELP, define_flags, tune, system="baseline")}
