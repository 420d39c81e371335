"""Tests of settings, phases, groups and differences between configurations."""

import ast
import dataclasses
import inspect
import json
from pathlib import Path
from typing import get_args

import jax
import pytest

import fedjax_pfl
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.setting import Role
from fedjax_pfl.data import SPLITS, partition_settings, source_settings
from fedjax_pfl.networks.lowerings.conv import lowering
from fedjax_pfl.runs import build, runner
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.differences import differences, only_adds_rounds
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


def signature_settings(kind, name):
    """Returns the settings of a factory with their defaults, from its signature."""
    factory = KINDS[kind][name]
    if dataclasses.is_dataclass(factory):
        fields = {f.name: f.default for f in dataclasses.fields(factory)}
        return {k: v for k, v in fields.items() if k not in ("outputs", "conv", "parent", "name")}
    parameters = inspect.signature(factory).parameters.values()
    settings = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {k: v for k, v in settings.items() if k not in ("rounds", "first_round")}


def checked(changes):
    """Returns a valid configuration with changes."""
    config = configuration.complete({**TINY, **changes})
    configuration.specify(config)
    return config


def message(changes, check=checked):
    """Returns the line with which a configuration is refused."""
    with pytest.raises(UsageError) as caught:
        check(changes)
    line = str(caught.value)
    assert line
    assert "\n" not in line
    return line


def built(changes):
    return build.build(configuration.complete({**TINY, **changes}))


# Factories.


@pytest.mark.parametrize(("kind", "name"), FACTORIES)
def test_settings_of_a_factory_are_a_sub_config(kind, name):
    sub = configuration.default().get(name)
    expected = signature_settings(kind, name)
    assert (sub.to_dict() if sub else {}).keys() == expected.keys()
    for key, value in expected.items():  # the default of classes.examples fits the digits
        assert sub[key] == value or (name, key) == ("classes", "examples"), key


def test_settings_of_sources_and_partitions():
    default = configuration.default()
    names = dict.fromkeys(configuration.PARTITIONS, partition_settings)
    for name, settings in (names | dict.fromkeys(configuration.DATASETS, source_settings)).items():
        assert set(settings(name)) == set(default.get(name, {}))


def test_names_are_unique_across_kinds_and_settings():
    names = [name for _, name in FACTORIES]
    assert len(names) == len(set(names))
    general = {k for k, v in configuration.default().items() if not hasattr(v, "items")}
    assert not general & set(names)


def test_attributes_of_settings_are_consistent():
    for name, setting in SETTINGS.items():
        roles = setting.roles
        assert roles <= set(get_args(Role)), name
        assert not roles >= {"per_phase", "resumable"}, name
        assert "per_process" not in roles or "resumable" in roles, name
        assert "sweepable" not in roles or ("tunable" in roles and "defines_data" not in roles), (
            name
        )
        assert "sweepable" not in roles or float in (type(setting.default), setting.default), name
        assert "tunable" not in roles or not roles & {"budget", "sets_participation"}, name
        assert not setting.choices or setting.default in setting.choices, name
        if isinstance(setting.default, int | float):
            assert setting.limits.violation(setting.default) == "", name
    assert SETTINGS["split"].choices == SPLITS
    for name in SETTINGS["conv"].choices:
        lowering(name)
    with pytest.raises(UsageError, match="is not a lowering") as error:
        lowering("another")
    assert set(SETTINGS["conv"].choices) == set(str(error.value).partition("from ")[2].split(", "))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("upload_bits", (1, 2, 16, 17), ("at least 2", "", "", "at most 16")),
        ("fraction", (0.0, 0.1, 1.0, 1.5), ("above 0", "", "", "at most 1")),
        ("dropout", (-0.1, 0.0, 0.9, 1.0), ("at least 0", "", "", "below 1")),
        ("clip_norm", (None, 0.0, 1e9), ("", "above 0", "")),
    ],
)
def test_bounds(name, values, expected):
    assert tuple(SETTINGS[name].limits.violation(value) for value in values) == expected


def test_settings_are_listed_only_in_general_and_presets():
    folder = Path(fedjax_pfl.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            items = getattr(node, "elts", ())
            if isinstance(node, ast.Dict) and all(isinstance(v, ast.Constant) for v in node.values):
                items = node.keys
            strings = {item.value for item in items if isinstance(item, ast.Constant)}
            names = {text for text in strings if isinstance(text, str) and text in SETTINGS}
            is_list = path.name in ("general.py", "stragglers.py")
            if not is_list and path.parent.name not in ("presets", "testing"):
                assert len(names) <= 2, (path, node.lineno, sorted(names))


def test_a_specification_is_frozen():
    specification = configuration.specify(configuration.complete({**TINY, "groups": [{}, {}]}))
    phase = specification.phases[0]
    for change in (
        lambda: setattr(specification, "phases", ()),
        lambda: setattr(specification.settings, "rounds", 3),
        lambda: setattr(phase.settings.mlp, "hidden", (3,)),
        lambda: setattr(phase.groups[1], "model", "small"),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()
    assert (specification.settings.rounds, len(phase.groups)) == (2, 2)


def test_a_run_is_validated_once(monkeypatch):
    calls, specify = [], configuration.specify
    monkeypatch.setattr(configuration, "specify", lambda *a: calls.append(a) or specify(*a))
    monkeypatch.setattr(
        runner, "_execute", lambda experiment, sweep_runs, stop, callbacks: {"": experiment}
    )
    experiment = runner.run({**TINY, "phases": [{}, {"rounds": 3}]})
    assert len(calls) == 1
    assert [phase.config.rounds for phase in experiment.phases] == [2, 3]


def test_complete_changes_only_the_given_settings():
    default = configuration.default()
    configuration.specify(default)
    config = configuration.complete({"rounds": 7, "mlp": {"hidden": [3]}})
    assert (config.rounds, config.mlp.hidden) == (7, (3,))
    config.rounds, config.mlp.hidden = default.rounds, default.mlp.hidden
    assert config.to_dict() == default.to_dict()


def test_the_official_split_ignores_test_fraction():
    checked({"split": "official", "test_fraction": 0.2, "validation_fraction": 0.8})
    assert "leave nothing to train on" in message({"validation_fraction": 0.8})


# Phases, groups and differences.


def test_phases_change_only_their_settings():
    config = checked({"phases": [{"rounds": 5}, {"algorithm": "local", "mlp": {"hidden": (2,)}}]})
    first, second = configuration.phases(config)
    assert (first.rounds, first.algorithm, first.mlp.hidden) == (5, "fedavg", (4,))
    assert (second.rounds, second.algorithm, second.mlp.hidden) == (2, "local", (2,))
    assert (config.rounds, config.mlp.hidden) == (2, (4,))  # unchanged
    assert [phase.rounds for phase in configuration.phases(checked({}))] == [2]


def test_groups_change_the_model():
    config = checked({"groups": [{}, {"mlp": {"hidden": (9,)}}, {"model": "small"}]})
    assert [(g.model, g.mlp.hidden) for g in configuration.groups(config)] == [
        ("mlp", (4,)),
        ("mlp", (9,)),
        ("small", (4,)),
    ]
    assert [g.model for g in configuration.groups(checked({}))] == ["mlp"]


def test_resolve_keeps_used_sub_configs_as_json():
    config = checked({"groups": [{}, {"model": "small"}], "phases": [{}, {"algorithm": "local"}]})
    resolved = configuration.resolve(config)
    again = configuration.complete(json.loads(json.dumps(resolved, allow_nan=False)))
    assert configuration.resolve(again) == resolved
    sub = {key for key in resolved if key in {name for _, name in FACTORIES}}
    assert sub == {"synthetic", "iid", "mlp", "small"}
    assert resolved["clients"] == 3
    assert configuration.default().keys() - resolved.keys() <= {name for _, name in FACTORIES}


def test_differences_name_settings_that_affect_results():
    old = configuration.resolve(checked({}))
    assert differences(old, old) == []
    current = json.loads(json.dumps(old))
    older = {k: v for k, v in current.items() if k not in ("keep_head", "groups")}
    assert differences(older, current) == []  # settings that came later, at their defaults
    assert "keep_head (False there" in differences(older, {**current, "keep_head": True})[0]
    new = {**old, "seed": 3, "data_dir": "x", "chunk": 4, "devices": 1, "checkpoint_every": 2}
    assert differences(old, new) == ["seed (0 there, 3 here)"]
    without_seed = {k: v for k, v in old.items() if k != "seed"}
    assert differences(old, without_seed)[0].startswith("seed (0 there, None here)")
    (line,) = differences(old, configuration.resolve(checked({"mlp": {"hidden": (5,)}})))
    assert line.startswith("mlp.hidden (")


def test_differences_in_a_group_count_also_under_the_name_of_a_resumable_setting():
    """reference=true adds runs for comparison; fedfomo.reference is a part of the method."""
    start, last = (
        configuration.resolve(checked({"algorithm": "fedfomo", "fedfomo": {"reference": value}}))
        for value in ("start", "last")
    )
    assert differences(start, last) == ["fedfomo.reference ('start' there, 'last' here)"]
    assert differences(start, {**start, "reference": True}) == []


def test_only_the_last_phase_can_have_more_rounds():
    def resolved(first, last):
        return configuration.resolve(checked({"phases": [{"rounds": first}, {"rounds": last}]}))

    assert only_adds_rounds(resolved(2, 3), resolved(2, 4))
    for first, last in ((2, 3), (2, 2), (3, 3), (3, 4)):
        assert not only_adds_rounds(resolved(2, 3), resolved(first, last))


@pytest.mark.slow("builds every method")
def test_building_compiles_nothing(caplog):
    jax.clear_caches()  # or programs of other tests would be reused
    with jax.log_compiles(), caplog.at_level("WARNING"):
        built({"phases": [{}, {"algorithm": "local"}], "learning_rate_drops": (0.5,)})
    assert not [r for r in caplog.records if "XLA compilation of jit(run" in r.getMessage()]
    assert not [r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
