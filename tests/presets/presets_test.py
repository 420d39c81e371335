"""Presets: the words of a configuration file."""

import re

import pytest
from absl import flags
from ml_collections import config_flags

from fedjax_pfl.cli.errors import in_one_line
from fedjax_pfl.presets import baseline, factorized_fl
from fedjax_pfl.presets.words import DATASETS, apply_words
from fedjax_pfl.settings import configuration
from tests.commands import message


def test_a_preset_is_its_words():
    made = baseline.get_config("fedavg-cifar10-classes4-n10")
    assert (made.algorithm, made.dataset, made.partition) == ("fedavg", "cifar10", "classes")
    assert (made.classes.per_client, made.classes.examples, made.clients) == (4, 600, 10)
    assert made.model == "lenet"


@pytest.mark.parametrize(
    ("preset", "wanted"),
    [
        ("local", {"algorithm": "local", "dataset": "digits", "model": "small"}),
        ("digits", {"algorithm": "fedavg", "learning_rate": 0.05}),
        ("", {"algorithm": "fedavg", "dataset": "digits"}),
        ("n100-iid", {"clients": 100, "partition": "iid"}),
        ("dominant3", {"partition": "dominant", "dominant": {"dominant": 3}}),
        ("dirichlet0.25", {"partition": "dirichlet", "dirichlet": {"alpha": 0.25}}),
        ("mnist-local", {"dataset": "mnist", "model": "lenet", "learning_rate": 0.005}),
        ("fashion_mnist-n3", {"dataset": "fashion_mnist", "clients": 3}),
        ("synthetic", {"dataset": "synthetic", "model": "mlp"}),
    ],
)
def test_words_change_what_they_name(preset, wanted):
    made = baseline.get_config(preset)
    for key, value in wanted.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                assert made[key][name] == inner
        else:
            assert made[key] == value
    configuration.specify(made)


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_dataset_brings_its_own_defaults_and_no_others(dataset):
    """Not those of the digits, with which every preset begins."""
    made, default = baseline.get_config(dataset), configuration.default()
    assert made.dataset == dataset
    for key in {key for own in DATASETS.values() for key in own}:
        assert made[key] == DATASETS[dataset].get(key, default[key]), key


def test_the_order_of_words_does_not_matter():
    one, other = (baseline.get_config(p) for p in ("mnist-n7-local-iid", "iid-local-n7-mnist"))
    assert one.to_dict() == other.to_dict()


@pytest.mark.parametrize(
    ("preset", "nearest"),
    [("fedagv", "fedavg"), ("cifar01", "cifar10"), ("clases7", "classes7"), ("iidd", "iid")],
)
def test_an_unknown_word_gets_the_nearest(preset, nearest):
    line = message(baseline.get_config, f"local-{preset}-n3")
    assert line == (
        f"there is no preset 'local-{preset}-n3': {preset!r} is no word of one; "
        f"did you mean local-{nearest}-n3?"
    )


def test_an_unknown_word_like_no_other_gets_three():
    line = message(factorized_fl.get_config, "zzzz")
    assert re.search(r"is no word of one; the nearest of \d\d are \w+, \w+ and \w+$", line)


@pytest.mark.filterwarnings("ignore:the load_module")  # with which config files are read
@pytest.mark.parametrize(
    ("preset", "nearest"), [("fedavgg-digits", "fedavg-digits"), ("fedavg-digitz", "fedavg-digits")]
)
def test_a_preset_with_a_typo_on_the_command_line_is_one_message(preset, nearest):
    def parse():
        found = flags.FlagValues()
        with in_one_line():
            config_flags.DEFINE_config_file("config", flag_values=found)
            found(["command", f"--config={baseline.__file__}:{preset}"])

    line = message(parse)
    assert line.startswith(f"there is no preset {preset!r}: ")
    assert line.endswith(f"did you mean {nearest}?")


def test_every_word_of_the_documentation_is_a_preset():
    """The words in brackets in the docstring, which is what --help shows."""
    words = baseline.__doc__.replace("\n", " ").split("(")[1:]
    words = [w.strip() for part in words for w in part.split(")")[0].split(",")]
    assert {"fedavg", "digits", "classes4", "n10"} <= set(words)
    for word in words:
        if word != "...":
            baseline.get_config(word)


def test_a_systems_own_words_come_after_the_shared_ones():
    def use(settings, match):
        settings.seed = int(match["s"])

    made = apply_words(configuration.default(), "mnist-s12", {r"s(?P<s>\d+)": use})
    assert (made.seed, made.dataset) == (12, "mnist")
    assert "own" in message(apply_words, configuration.default(), "ownn", {"own": use})
