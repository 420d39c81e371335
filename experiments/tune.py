"""Settings chosen on validation examples, with equal budgets for all methods.

python -m experiments.tune --config=pfedla:digits \\
    --config.validation_fraction=.2 --methods=pfedla,fedavg,local --rounds=20 --seeds=2 \\
    --grid="learning_rate=.1,.03,.01" --grid="pfedla.rate=.2,.5; pfedla.embedding=50,100" \\
    --budget=3 --out=runs/tune/digits

A key of a grid is a training setting, for all methods, or METHOD.SETTING, for one: its own setting,
or a training setting that has other values for this method. All combinations are tried, or as many
of each method as --budget says. Real-valued settings and seeds are one program; integers, words and
booleans (true, false) make programs of their own.

The highest accuracy on validation examples is chosen: mean over clients at a run's best evaluation,
mean over seeds; of equal ones the first in the grid's order. Test examples have no part in it.

The folder --out gets the runs, tables, a picture, a page and tuned.py, a configuration file with a
preset for each method: --config=FOLDER/tuned.py:METHOD. The same command goes on with what was cut
and only reads what is finished; so does one with another grid.
"""

import inspect
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags, config_path

from fedjax_pfl.cli import command as launch
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs.tuning import search, trials
from fedjax_pfl.settings import selection
from fedjax_pfl.simulation.devices import prepare_devices


def configured(
    source: str, base: ConfigDict, changes: Mapping[str, Any], methods: Sequence[str]
) -> dict[str, ConfigDict]:
    """The configuration of each method.

    Where a file's presets have methods for words, as all of ours, a method has the settings that
    its word brings; elsewhere only `algorithm` changes.

    Args:
      source: FILE.py:PRESET.
      base: what it says, with the changes.
      changes: of the command line, by path.
    """
    made = {}
    for method in methods:
        one = None if method == base.algorithm else _with_word(source, method)
        if one is None:
            one = base.copy_and_resolve_references()
        else:
            with launch.in_one_line():
                for path, value in changes.items():
                    config_path.set_value(path, one, value)
            launch.replace_length(one, [f"--config.{path}=" for path in changes])
            one.data_dir = base.data_dir
        one.algorithm = method
        made[method] = one
    return made


def _with_word(source: str, method: str) -> ConfigDict | None:
    """The preset and one more word, if that is one and names the method."""
    path, _, preset = source.partition(":")
    try:
        make = runpy.run_path(path)["get_config"]
        usual = next(iter(inspect.signature(make).parameters.values())).default
        found = make("-".join(filter(None, (preset or usual, method))))
    except Exception:  # a config file is code, which need not know such words
        return None
    return found if found.algorithm == method else None


def main(argv: Sequence[str]) -> None:
    """The command line."""
    chosen = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; settings are given as --config.KEY=VALUE")
    if chosen.workdir is not None:
        raise UsageError("the runs, tables and preset are written to --out here; leave workdir out")
    base = chosen.config.copy_and_resolve_references()
    launch.replace_length(base, sys.argv[1:])
    if chosen.data_dir is not None:
        base.data_dir = chosen.data_dir
    if base.sweep:
        raise UsageError("what is tried is said by --grid here; leave sweep out")
    methods = search.known(chosen.methods or [base.algorithm])
    source = config_flags.get_config_filename(chosen["config"])
    changes = config_flags.get_override_values(chosen["config"])
    each = configured(source, base, changes, methods)
    selection.check_given(selection.nested(changes), list(each.values()))
    made = search.plan(
        each,
        chosen.grid,
        chosen.rounds,
        chosen.budget,
        chosen.budget_seed,
        as_preset=not set(trials.LENGTH) & set(changes),
    )
    seeds = chosen.seeds or base.seeds
    sys.exit(
        search.tune(
            made,
            seeds=seeds,
            out=Path(chosen.out),
            texts=chosen.grid,
            budget=chosen.budget,
            together=chosen.together,
            only_show=chosen.only_show,
            form=chosen.format,
        )
    )


if __name__ == "__main__":
    # Here, because other commands have flags of these names too.
    flags.DEFINE_list("methods", [], "Methods to tune. Default: that of the configuration.")
    flags.DEFINE_multi_string("grid", [], "KEY=VALUE,VALUE; METHOD.KEY=VALUE,VALUE")
    flags.DEFINE_integer(
        "budget",
        None,
        "Points of each method, drawn from its grid. Default: all, and as many of each.",
        lower_bound=1,
    )
    flags.DEFINE_integer("budget_seed", 0, "Of the draw.", lower_bound=0)
    flags.DEFINE_integer(
        "seeds", None, "From config.seed on. Default: config.seeds.", lower_bound=1
    )
    flags.DEFINE_integer(
        "rounds",
        None,
        "Of the first method's runs, with all phases; the others' are shortened in proportion.",
        lower_bound=1,
    )
    flags.DEFINE_integer("together", None, "Most runs in one program. Default: all.", lower_bound=1)
    flags.DEFINE_string("out", "runs/tune", "Folder of the runs, tables and tuned.py.")
    flags.DEFINE_bool("only_show", False, "Run nothing: print what there is.")
    flags.DEFINE_enum("format", "text", list(search.FORMATS), "Of what is printed.")
    prepare_devices()
    launch.command(main, config="baseline")
