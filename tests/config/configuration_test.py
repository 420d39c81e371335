"""Settings: where they come from, how they resolve, and what is said of those that cannot be."""

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path

import jax
import pytest

import fedjax_pfl
from fedjax_pfl.config import configuration
from fedjax_pfl.config.settings import ROWS
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import SPLITS, partition_settings, source_settings
from fedjax_pfl.networks.lowerings.conv import lowering
from fedjax_pfl.runs import build, runner

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
    for name, row in ROWS.items():
        assert not (row.per_phase and row.resumable), name
        assert not row.per_process or row.resumable, name
        assert not row.sweepable or (row.tunable and not row.defines_data), name
        assert not row.sweepable or float in (type(row.default), row.default), name
        assert not (row.tunable and (row.budget or row.visits)), name
        assert not row.choices or row.default in row.choices, name
        unset = isinstance(row.default, type)
        assert unset or not isinstance(row.default, int | float) or row.wrong(row.default) == ""
    assert ROWS["split"].choices == SPLITS
    for name in ROWS["conv"].choices:
        lowering(name)
    with pytest.raises(UsageError, match="is not a lowering") as error:
        lowering("another")
    assert set(ROWS["conv"].choices) == set(str(error.value).partition("from ")[2].split(", "))


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
    assert tuple(ROWS[name].wrong(value) for value in values) == wanted


def test_no_list_of_settings_is_written_by_hand():
    """But in the rows: what is said of settings in general follows from them."""
    folder = Path(fedjax_pfl.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            items = getattr(node, "elts", ())
            if isinstance(node, ast.Dict) and all(isinstance(v, ast.Constant) for v in node.values):
                items = node.keys
            words = {one.value for one in items if isinstance(one, ast.Constant)}
            named = {word for word in words if isinstance(word, str) and word in ROWS}
            if path.name != "settings.py":
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
    monkeypatch.setattr(runner, "_execute", lambda built, members, stop: {"": built})
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


# What is refused.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rte": 0.1}, ["learning_rte", "did you mean learning_rate?"]),
        ({"synthetic": {"noize": 0.1}}, ["synthetic.noize", "did you mean synthetic.noise?"]),
        ({"phases": [{"roundz": 3}]}, ["roundz", "did you mean rounds?"]),
        ({"phases": [{"clients": 3}]}, ["phase cannot change clients"]),
        ({"phases": [{"synthetic": {"noise": 2.0}}]}, ["phase cannot change synthetic"]),
        (
            {"phases": [{"mlp": {"hiden": (2,)}}]},
            ["phases[0].mlp.hiden", "did you mean phases[0].mlp.hidden?"],
        ),
        ({"phases": [3]}, ["phases[0]", "rounds=10"]),
        ({"groups": [{"rounds": 3}]}, ["groups[0]", "model"]),
        ({"groups": [{}, {"model": "mpl"}]}, ["'mpl'", "did you mean mlp?"]),
        ({"algorithm": "fedagv"}, ["'fedagv'", "did you mean fedavg?"]),
        ({"algorithm": "LG-FedAvg"}, ["'LG-FedAvg'", "did you mean lg_fedavg?"]),
        ({"algorithm": "zzzzz"}, ["'zzzzz'", "fedavg", "local"]),
        ({"partition": "clases"}, ["did you mean classes?"]),
        ({"model": "lenett"}, ["did you mean lenet?"]),
        ({"dataset": "cifar"}, ["did you mean cifar10"]),
        ({"conv": "blobs"}, ["'blobs'", "did you mean blocks?"]),
    ],
)
def test_unknown_words_get_the_nearest_one(changes, words):
    line = message(changes)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": "many"}, ["rounds is 'many'", "int"]),
        ({"rounds": 2.5}, ["rounds is 2.5", "int"]),
        ({"rounds": True}, ["rounds is True", "int"]),
        ({"rounds": None}, ["rounds is None", "int"]),
        ({"learning_rate": "fast"}, ["learning_rate is 'fast'", "float"]),
        ({"learning_rate": True}, ["learning_rate is True", "float"]),
        ({"momentum": None}, ["momentum is None", "float"]),
        ({"keep_momentum": "yes"}, ["keep_momentum is 'yes'", "bool"]),
        ({"algorithm": None}, ["algorithm"]),
        ({"clients_per_round": 1.5}, ["clients_per_round is 1.5", "int"]),
        ({"synthetic": 3}, ["synthetic is a group of settings", "{'synthetic': {NAME: VALUE}}"]),
        ({"synthetic.noise": 3.0}, ["synthetic.noise; write {'synthetic': {'noise': 3.0}}"]),
        ({"synthetic": {"noise": "loud"}}, ["synthetic.noise is 'loud'", "float"]),
        ({"synthetic": {"noise": None}}, ["synthetic.noise is None"]),
        ({"synthetic": {"noise": float("nan")}}, ["synthetic.noise is nan", "finite"]),
        ({"synthetic": {"shape": ("a",)}}, ["synthetic.shape is ('a',)"]),
        ({"phases": [{"rounds": "x"}]}, ["phases[0].rounds is 'x'"]),
        ({"phases": [{"rounds": None}]}, ["phases[0].rounds is None"]),
        ({"groups": [{"mlp": {"hidden": None}}]}, ["groups[0].mlp.hidden is None"]),
        ({"groups": 2}, ["groups is 2", "tuple"]),
    ],
)
def test_values_of_the_wrong_type(changes, words):
    line = message(changes)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clients_per_round": 4}, ["clients_per_round is 4", "3 clients", "1 to 3"]),
        ({"clients_per_round": 3, "held_out": 1}, ["there are 2 clients", "1 to 2"]),
        ({"clients_per_round": 0}, ["clients_per_round is 0", "at least 1"]),
        ({"learning_rate": -0.1}, ["learning_rate is -0.1", "above 0"]),
        ({"learning_rate": 0.0}, ["learning_rate is 0.0", "above 0"]),
        ({"learning_rate": float("inf")}, ["learning_rate is inf", "finite"]),
        ({"batch_size": 0}, ["batch_size is 0", "at least 1"]),
        ({"rounds": 0}, ["rounds is 0"]),
        ({"clients": 0}, ["clients is 0"]),
        ({"eval_every": 0}, ["eval_every is 0"]),
        ({"held_out": 3}, ["held_out is 3 of 3"]),
        ({"participants": "novel"}, ["participants is 'novel'", "active, held_out"]),
        ({"participants": "held_out"}, ["participants is held_out", "held_out is 0"]),
        (
            {"held_out": 1, "clients_per_round": 2, "phases": [{}, {"participants": "held_out"}]},
            ["phases[1].clients_per_round is 2", "there are 1 clients"],
        ),
        ({"held_out": -1}, ["held_out is -1"]),
        ({"momentum": 1.0}, ["momentum is 1.0", "below 1"]),
        ({"momentum": -0.5}, ["momentum is -0.5", "at least 0"]),
        ({"dropout": 1.0}, ["dropout is 1.0", "below 1"]),
        ({"clip_norm": 0.0}, ["clip_norm is 0.0", "above 0"]),
        ({"max_update_norm": -1.0}, ["max_update_norm is -1.0"]),
        ({"seed": -1}, ["seed is -1"]),
        ({"seed": 2**31}, ["seed is 2147483648", "at most"]),
        ({"rounds": 2**40}, ["rounds is 1099511627776", "at most 2147483647"]),
        ({"mlp": {"hidden": (2**31,)}}, ["mlp.hidden is (2147483648,)", "at most 2147483647"]),
        ({"phases": [{"rounds": 2**30}] * 2}, ["2147483648 rounds", "at most 2147483647"]),
        ({"upload_bits": 1}, ["upload_bits is 1", "at least 2"]),
        ({"upload_bits": 17}, ["upload_bits is 17", "at most 16"]),
        ({"upload_top_k": 1.5}, ["upload_top_k is 1.5", "at most 1"]),
        ({"fraction": 1.5}, ["fraction is 1.5", "at most 1"]),
        ({"fraction": 0.0}, ["fraction is 0.0", "above 0"]),
        ({"test_fraction": 0.6, "validation_fraction": 0.4}, ["nothing to train on"]),
        (
            {"validate_after": True, "evaluate_after": False},
            ["validate_after needs evaluate_after", "both"],
        ),
        ({"local_epochs": 1, "local_steps": 1}, ["local_epochs and local_steps", "choose one"]),
        ({"learning_rate_drops": (1.5,)}, ["learning_rate_drops", "between 0 and 1"]),
        ({"learning_rate_drops": ("x",)}, ["learning_rate_drops"]),
        ({"phases": [{}, {"batch_size": 0}]}, ["phases[1].batch_size is 0"]),
        ({"phases": [{"clients_per_round": 9}]}, ["phases[0].clients_per_round is 9"]),
    ],
)
def test_values_that_cannot_be(changes, words):
    line = message(changes)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "dataset": "digits",
                "partition": "classes",
                "classes": {"per_client": 4, "examples": 600},
                "clients": 500,
            },
            ["500 clients x 4 classes x 600 examples", "1,797 examples", "at most 449 clients"],
        ),
        ({"clients": 50}, ["clients is 50", "60 examples", "at most 30 clients"]),
        ({"split": "official"}, ["synthetic", "no test set", "split=pooled"]),
        ({"split": "poold"}, ["poold", "did you mean pooled?"]),
        ({"groups": [{}] * 4}, ["groups=4"]),
        ({"mlp": {"hidden": (-1,)}}, ["mlp", "does not suit examples (2, 2, 1)"]),
        ({"model": "lenet"}, ["lenet", "does not suit examples (2, 2, 1)"]),
        ({"devices": 1000}, ["devices is 1000"]),
        (
            {"phases": [{"algorithm": "fedavg"}, {"mlp": {"hidden": (5,)}}]},
            ["phase", "global model of the same network"],
        ),
        ({"phases": [{"algorithm": "local"}, {}]}, ["phase", "global model"]),
    ],
)
def test_what_only_building_shows(changes, words):
    line = message(changes, built)
    assert all(word in line for word in words), line


def test_a_dataset_that_is_not_there_says_how_to_get_it(tmp_path):
    line = message({"dataset": "cifar10", "data_dir": str(tmp_path)}, built)
    wanted = ["-m pip install tensorflow", "download_and_prepare", "162 MiB", str(tmp_path)]
    assert all(word in line for word in wanted), line


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
    plain = configuration.resolved(made)
    assert json.loads(json.dumps(plain, allow_nan=False))
    sub = {key for key in plain if key in {name for _, name in FACTORIES}}
    assert sub == {"synthetic", "iid", "mlp", "small"}
    assert plain["clients"] == 3
    assert configuration.default().keys() - plain.keys() <= {name for _, name in FACTORIES}
    again = configuration.complete(json.loads(json.dumps(plain)))
    assert configuration.resolved(again) == plain


def test_differences_name_the_settings_that_a_resumption_keeps():
    old = configuration.resolved(checked({}))
    assert configuration.differences(old, old) == []
    now = json.loads(json.dumps(old))
    younger = {k: v for k, v in now.items() if k not in ("keep_head", "groups")}
    assert (
        configuration.differences(younger, now) == []
    )  # settings that came later, at their defaults
    assert (
        "keep_head (False there"
        in configuration.differences(younger, {**now, "keep_head": True})[0]
    )
    new = {**old, "seed": 3, "data_dir": "x", "chunk": 4, "devices": 1, "checkpoint_every": 2}
    (line,) = configuration.differences(old, new)
    assert re.fullmatch(r"seed \(0 there, 3 here\)", line)
    assert configuration.differences(old, {k: v for k, v in old.items() if k != "seed"})[
        0
    ].startswith("seed (0 there, None here)")
    nested = configuration.resolved(checked({"mlp": {"hidden": (5,)}}))
    (line,) = configuration.differences(old, nested)
    assert line.startswith("mlp.hidden (")


def test_building_compiles_nothing(caplog):
    jax.clear_caches()  # what other tests have compiled would not show again
    with jax.log_compiles(), caplog.at_level("WARNING"):
        built({"phases": [{}, {"algorithm": "local"}], "learning_rate_drops": (0.5,)})
    assert not [r for r in caplog.records if "XLA compilation of jit(run" in r.getMessage()]
    assert not [r for r in caplog.records if "Finished XLA compilation" in r.getMessage()]


def test_messages_of_the_library_name_no_flag():
    """Whoever calls it from Python has none; the commands' own are in experiments/."""
    for path in Path(fedjax_pfl.__file__).parent.rglob("*.py"):
        strings = (n.value for n in ast.walk(ast.parse(path.read_text()))
                   if isinstance(n, ast.Constant) and isinstance(n.value, str))  # fmt: skip
        flagged = [text for text in strings if re.search(r"--[a-z]+[.=]|--(workdir|config)", text)]
        if path.name != "listing.py" and path.parent.name != "tuning":  # what commands show
            assert flagged == [], path
