"""Tests of presets: the words of a configuration name."""

import re

import pytest

from fedjax_pfl.presets import baseline, factorized_fl, pfedhn, pfedla
from fedjax_pfl.presets.vocabulary import DATASETS, apply_words
from fedjax_pfl.settings import configuration
from tests.commands import message


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (
            "fedavg-cifar10-classes4-n10",
            {
                "algorithm": "fedavg",
                "dataset": "cifar10",
                "partition": "classes",
                "classes": {"per_client": 4, "examples": 600},
                "clients": 10,
                "model": "lenet",
            },
        ),
        ("local", {"algorithm": "local", "dataset": "digits", "model": "small"}),
        ("digits", {"algorithm": "fedavg", "learning_rate": 0.05}),
        ("", {"algorithm": "fedavg", "dataset": "digits"}),
        ("n100-iid", {"clients": 100, "partition": "iid"}),
        ("dominant3", {"partition": "dominant", "dominant": {"dominant": 3}}),
        ("dirichlet0.25", {"partition": "dirichlet", "dirichlet": {"alpha": 0.25}}),
        ("mnist-local", {"dataset": "mnist", "model": "lenet", "learning_rate": 0.005}),
        ("synthetic", {"dataset": "synthetic", "model": "mlp"}),
    ],
)
def test_words_change_their_settings(preset, expected):
    config, changed = baseline.get_config(preset), baseline.get_config(preset)
    changed.update(expected)
    assert changed.to_dict() == config.to_dict()
    configuration.specify(config)


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_dataset_has_its_own_defaults_only(dataset):
    config, default = baseline.get_config(dataset), configuration.default()
    assert config.dataset == dataset
    for key in {key for settings in DATASETS.values() for key in settings}:
        assert config[key] == DATASETS[dataset].get(key, default[key]), key


def test_the_order_of_words_does_not_matter():
    configs = [baseline.get_config(p) for p in ("mnist-n7-local-iid", "iid-local-n7-mnist")]
    assert configs[0].to_dict() == configs[1].to_dict()


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("fedagv", "fedavg"), ("cifar01", "cifar10"), ("clases7", "classes7"), ("iidd", "iid")],
)
def test_unknown_words_get_a_suggestion(word, nearest):
    assert message(baseline.get_config, f"local-{word}-n3") == (
        f"there is no preset 'local-{word}-n3': {word!r} is no word of one; "
        f"did you mean local-{nearest}-n3?"
    )


def test_a_word_without_a_similar_one_gets_three():
    line = message(factorized_fl.get_config, "zzzz")
    assert re.search(r"is no word of one; the nearest of \d\d are \w+, \w+ and \w+$", line)


def test_every_word_of_the_documentation_is_a_preset():
    """Reads the words in brackets in the docstring, which --help shows."""
    brackets = baseline.__doc__.replace("\n", " ").split("(")[1:]
    documented = {word.strip() for text in brackets for word in text.split(")")[0].split(",")}
    assert {"fedavg", "digits", "classes4", "n10"} <= documented
    for word in documented - {"..."}:
        baseline.get_config(word)


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("fedavg-n3-local", "'fedavg' and 'local'"),
        ("mnist-cifar10", "'mnist' and 'cifar10'"),
        ("n10-iid-n20", "'n10' and 'n20'"),
        ("iid-classes4", "'iid' and 'classes4'"),
        ("classes4-classes2", "'classes4' and 'classes2'"),
    ],
)
def test_words_that_contradict_each_other_are_refused(preset, words):
    assert message(baseline.get_config, preset) == (
        f"there is no preset {preset!r}: {words} contradict each other; leave one out"
    )
    config = baseline.get_config("n10-n10-mnist-mnist")  # equal words do not
    assert (config.clients, config.dataset) == (10, "mnist")
    assert "'n5' and 'n6' contradict" in message(factorized_fl.get_config, "n5-n6")


def test_words_that_a_dataset_or_method_does_not_use_are_refused():
    for word, partition in (("iid", "iid"), ("dirichlet0.5", "dirichlet")):
        assert message(pfedhn.get_config, f"omniglot-{word}") == (
            f"there is no preset 'omniglot-{word}': a client of omniglot has an alphabet; leave "
            f"{partition} out"
        )
    assert message(pfedhn.get_config, "mnist-local-k5") == (
        "there is no preset 'mnist-local-k5': local trains all clients; leave k5 out"
    )
    assert message(pfedla.get_config, "cifar10-k1-fedavg") == (
        "there is no preset 'cifar10-k1-fedavg': k1 is for pfedla, and the method is fedavg; leave "
        "one out"
    )
    line = message(factorized_fl.get_config, "fedavg-alpha")
    assert "alpha is for factorized_fl and factorized_fl_moved, and the method is fedavg" in line
    assert pfedla.get_config("k1").pfedla.k == 1
    # 1,600 of the 1,797 digits are for the clients.
    for preset, images in (("digits", 160), ("digits-n20", 80), ("digits-n100", 16)):
        for system in (pfedla, baseline):
            config = system.get_config(preset)
            assert (config.classes.examples, config.dominant.examples) == (images, images)
    assert factorized_fl.get_config("alpha-factorized_fl_moved").factorized_fl_moved.share == "u"
    assert pfedhn.get_config("omniglot").partition == "natural"
    assert pfedhn.get_config("mnist-local").clients_per_round is None


@pytest.mark.parametrize("preset", ["mnist-sizes", "sizes-fedavg-omniglot", "femnist-sizes"])
def test_networks_of_three_sizes_are_for_digits_and_cifar(preset):
    assert message(pfedhn.get_config, preset) == (
        f"there is no preset {preset!r}: sizes needs one of the datasets digits, cifar10, cifar100"
    )
    sized = {dataset: pfedhn.get_config(f"{dataset}-sizes") for dataset in pfedhn._SIZED}
    networks = {dataset: list(map(dict, config.groups)) for dataset, config in sized.items()}
    cifar = [{"lenet": {"kernels": (k, 2 * k)}} for k in (8, 16, 32)]
    digits = [{"small": group["lenet"]} for group in cifar]
    assert networks == {"digits": digits, "cifar10": cifar, "cifar100": cifar}
    for config in sized.values():
        configuration.specify(config)


def test_a_width_of_resnet9_is_refused_with_another_network():
    line = message(lambda: factorized_fl.get_config("digits-w16"))
    assert "w16 narrows ResNet9, and digits have another network" in line
    assert factorized_fl.get_config("mnist-w16").resnet9.width == 16


def test_numbers_that_no_run_can_have_are_no_words():
    for word in ("dirichlet1.2.3", "dirichlet."):
        assert f"{word!r} is no word of one" in message(baseline.get_config, word)
    for word in ("k0", "steps0"):
        assert f"{word!r} is no word of one" in message(pfedhn.get_config, word)
    assert baseline.get_config("dirichlet.5").dirichlet.alpha == 0.5


def test_words_of_one_system():
    own_words = {r"s(\d+)": lambda match: {"seed": int(match[1])}}
    config = apply_words(configuration.default(), "mnist-s12", own_words)
    assert (config.seed, config.dataset) == (12, "mnist")
    assert "own" in message(apply_words, configuration.default(), "ownn", {"own": None})
