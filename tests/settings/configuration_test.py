"""Settings: where they come from, how they resolve, and what a directory keeps of them."""

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path

import jax
import pytest

import fedjax_pfl
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import SPLITS, partition_settings, source_settings
from fedjax_pfl.networks.lowerings.conv import lowering
from fedjax_pfl.runs import build, runner
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.differences import differences
from fedjax_pfl.settings.general import SETTINGS

TINY = {
    "dataset": "synthetic",
    "synthetic": {"shape": (2, 2, 1), "classes": 3, "examples": 60, "test_examples": 0},
    "partition": "iid",
    "model": "mlp",
    "mlp": {"hidden": (4,)},
    "clients": 3,
    "rounds": 2,
}
KINDS = {
    "algorithm": configuration.ALGORITHMS,
    "dataset": configuration.DATASETS,
    "partition": configuration.PARTITIONS,
    "model": configuration.MODELS,
    "task": configuration.TASKS,
}
FACTORIES = [(kind, name) for kind, table in KINDS.items() for name in table]


def own_settings(kind, name):
    """What a factory can be told, read off its signature."""
    factory = KINDS[kind][name]
    if dataclasses.is_dataclass(factory):
        fields = {f.name: f.default for f in dataclasses.fields(factory)}
        return {k: v for k, v in fields.items() if k not in ("outputs", "conv", "parent", "name")}
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def checked(changes):
    made = configuration.complete({**TINY, **changes})
    configuration.specify(made)
    return made


def message(changes, made_by=checked):
    """The one line that a configuration is refused with."""
    with pytest.raises(UsageError) as caught:
        made_by(changes)
    line = str(caught.value)
    assert line
    assert "\n" not in line
    return line


def built(changes):
    return build.build(configuration.complete({**TINY, **changes}))


# Where settings come from.


@pytest.mark.parametrize(("kind", "name"), FACTORIES)
def test_a_factorys_settings_are_in_the_sub_config_of_its_name(kind, name):
    sub = configuration.default().get(name)
    wanted = own_settings(kind, name)
    assert (sub.to_dict() if sub else {}).keys() == wanted.keys()
    for key, value in wanted.items():  # the default partition's examples suit the digits instead
        assert sub[key] == value or (name, key) == ("classes", "examples"), key


def test_sources_and_partitions_agree_with_what_they_say_of_themselves():
    default = configuration.default()
    for name in configuration.PARTITIONS:
        assert set(partition_settings(name)) == set(default.get(name, {}))
    for name in configuration.DATASETS:
        assert set(source_settings(name)) == set(default.get(name, {}))


def test_names_are_unique_across_kinds_and_settings():
    names = [name for _, name in FACTORIES]
    assert len(names) == len(set(names))
    plain = {k for k, v in configuration.default().items() if not hasattr(v, "items")}
    assert not plain & set(names)


def test_the_facts_of_a_row_agree_with_each_other():
    for name, row in SETTINGS.items():
        assert not (row.per_phase and row.resumable), name
        assert not row.per_process or row.resumable, name
        assert not row.sweepable or (row.tunable and not row.defines_data), name
        assert not row.sweepable or float in (type(row.default), row.default), name
        assert not (row.tunable and (row.budget or row.sets_participation)), name
        assert not row.choices or row.default in row.choices, name
        unset = isinstance(row.default, type)
        assert unset or not isinstance(row.default, int | float) or row.violation(row.default) == ""
    assert SETTINGS["split"].choices == SPLITS
    for name in SETTINGS["conv"].choices:
        lowering(name)
    with pytest.raises(UsageError, match="is not a lowering") as error:
        lowering("another")
    assert set(SETTINGS["conv"].choices) == set(str(error.value).partition("from ")[2].split(", "))


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("upload_bits", (1, 2, 16, 17), ("at least 2", "", "", "at most 16")),
        ("fraction", (0.0, 0.1, 1.0, 1.5), ("above 0", "", "", "at most 1")),
        ("dropout", (-0.1, 0.0, 0.9, 1.0), ("at least 0", "", "", "below 1")),
        ("clip_norm", (None, 0.0, 1e9), ("", "above 0", "")),
    ],
)
def test_a_row_says_what_a_value_must_be(name, values, wanted):
    assert tuple(SETTINGS[name].violation(value) for value in values) == wanted


def test_no_list_of_settings_is_written_by_hand():
    """Except in their rows, in presets and in arguments of tests."""
    folder = Path(fedjax_pfl.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            items = getattr(node, "elts", ())
            if isinstance(node, ast.Dict) and all(isinstance(v, ast.Constant) for v in node.values):
                items = node.keys
            words = {one.value for one in items if isinstance(one, ast.Constant)}
            named = {word for word in words if isinstance(word, str) and word in SETTINGS}
            if path.name != "general.py" and path.parent.name not in ("presets", "testing"):
                assert len(named) <= 2, (path, node.lineno, sorted(named))


def test_a_specification_is_frozen():
    made = configuration.specify(configuration.complete({**TINY, "groups": [{}, {}]}))
    one = made.phases[0]
    for change in (
        lambda: setattr(made, "phases", ()),
        lambda: setattr(made.settings, "rounds", 3),
        lambda: setattr(one.settings.mlp, "hidden", (3,)),
        lambda: setattr(one.groups[1], "model", "small"),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()
    assert (made.settings.rounds, len(one.groups)) == (2, 2)


def test_a_run_is_validated_once(monkeypatch):
    found, specify = [], configuration.specify
    monkeypatch.setattr(configuration, "specify", lambda *a: found.append(a) or specify(*a))
    monkeypatch.setattr(
        runner, "_execute", lambda experiment, sweep_runs, stop, callbacks: {"": experiment}
    )
    made = runner.run({**TINY, "phases": [{}, {"rounds": 3}]})
    assert len(found) == 1
    assert [phase.config.rounds for phase in made.phases] == [2, 3]


def test_the_defaults_are_a_configuration():
    configuration.specify(configuration.default())


def test_complete_changes_what_is_given_and_no_more():
    made, default = (
        configuration.complete({"rounds": 7, "mlp": {"hidden": [3]}}),
        configuration.default(),
    )
    assert made.rounds == 7
    assert made.mlp.hidden == (3,)
    made.rounds, made.mlp.hidden = default.rounds, default.mlp.hidden
    assert made.to_dict() == default.to_dict()


# Phases, groups, and what a directory keeps.


def test_phases_change_what_they_say():
    made = checked({"phases": [{"rounds": 5}, {"algorithm": "local", "mlp": {"hidden": (2,)}}]})
    first, second = configuration.phases(made)
    assert (first.rounds, first.algorithm, first.mlp.hidden) == (5, "fedavg", (4,))
    assert (second.rounds, second.algorithm, second.mlp.hidden) == (2, "local", (2,))
    assert (made.rounds, made.mlp.hidden) == (2, (4,))  # what is given stays as it is
    assert [one.rounds for one in configuration.phases(checked({}))] == [2]


def test_groups_change_the_model():
    made = checked({"groups": [{}, {"mlp": {"hidden": (9,)}}, {"model": "small"}]})
    assert [(g.model, g.mlp.hidden) for g in configuration.groups(made)] == [
        ("mlp", (4,)),
        ("mlp", (9,)),
        ("small", (4,)),
    ]
    assert [g.model for g in configuration.groups(checked({}))] == ["mlp"]


def test_resolved_holds_what_is_used_and_is_json():
    made = checked({"groups": [{}, {"model": "small"}], "phases": [{}, {"algorithm": "local"}]})
    plain = configuration.resolve(made)
    assert json.loads(json.dumps(plain, allow_nan=False))
    sub = {key for key in plain if key in {name for _, name in FACTORIES}}
    assert sub == {"synthetic", "iid", "mlp", "small"}
    assert plain["clients"] == 3
    assert configuration.default().keys() - plain.keys() <= {name for _, name in FACTORIES}
    again = configuration.complete(json.loads(json.dumps(plain)))
    assert configuration.resolve(again) == plain


def test_differences_name_the_settings_that_a_resumption_keeps():
    old = configuration.resolve(checked({}))
    assert differences(old, old) == []
    now = json.loads(json.dumps(old))
    younger = {k: v for k, v in now.items() if k not in ("keep_head", "groups")}
    assert differences(younger, now) == []  # settings that came later, at their defaults
    assert "keep_head (False there" in differences(younger, {**now, "keep_head": True})[0]
    new = {**old, "seed": 3, "data_dir": "x", "chunk": 4, "devices": 1, "checkpoint_every": 2}
    (line,) = differences(old, new)
    assert re.fullmatch(r"seed \(0 there, 3 here\)", line)
    assert differences(old, {k: v for k, v in old.items() if k != "seed"})[0].startswith(
        "seed (0 there, None here)"
    )
    nested = configuration.resolve(checked({"mlp": {"hidden": (5,)}}))
    (line,) = differences(old, nested)
    assert line.startswith("mlp.hidden (")


def test_building_compiles_nothing(caplog):
    jax.clear_caches()  # what other tests have compiled would not show again
    with jax.log_compiles(), caplog.at_level("WARNING"):
        built({"phases": [{}, {"algorithm": "local"}], "learning_rate_drops": (0.5,)})
    assert not [r for r in caplog.records if "XLA compilation of jit(run" in r.getMessage()]
    assert not [r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]


@pytest.mark.parametrize(
    ("other", "setting"),
    [("lr", "learning_rate"), ("num_clients", "clients"), ("epochs", "local_epochs")],
)
def test_names_of_other_libraries_are_answered_with_the_setting(other, setting):
    with pytest.raises(UsageError, match=f"no setting {other}; did you mean {setting}?"):
        configuration.complete({other: 1})


def test_a_setting_whose_name_is_no_text_is_one_line():
    with pytest.raises(UsageError, match="there is no setting 77; the nearest of") as error:
        configuration.complete({77: 2})
    assert "\n" not in str(error.value)
