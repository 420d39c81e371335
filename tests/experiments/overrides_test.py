"""Tests of the flag --set, which changes settings."""

from experiments import overrides
from fedjax_pfl.settings import configuration
from tests.commands import message


def test_values_on_the_command_line():
    """Values are JSON, numbers such as .9, or words with or without quotes."""
    config = configuration.default()
    config.clients_per_round = 3
    pairs = [
        "momentum=.9",
        "clip_norm=10.",
        "model=mlp",
        'dataset="mnist"',
        "rounds=7",
        "fedprox.mu=1e-3",
        "augment=True",
        "evaluate_after=false",
        "clients_per_round=None",
        "learning_rate_drops=[.5]",
    ]
    assert message(overrides.override, config, pairs[-1:]).startswith(
        "--set=learning_rate_drops=[.5] is"
    )
    overrides.override(config, [*pairs[:-1], "learning_rate_drops=[0.5]"])
    assert (config.momentum, config.clip_norm, config.rounds) == (0.9, 10.0, 7)
    assert (config.model, config.dataset) == ("mlp", "mnist")
    assert (config.augment, config.evaluate_after, config.clients_per_round) == (True, False, None)
    assert (config.fedprox.mu, tuple(config.learning_rate_drops)) == (1e-3, (0.5,))
    for pair in ("momentum=much", "momentum", "augment=yes"):
        line = message(overrides.override, config, [pair])
        assert line == f"--set={pair} is no KEY=VALUE of this configuration"
    for pair, line in (
        ("rounds=.5", "rounds is 0.5; it must be of type int"),
        ("rounds=true", "rounds is True; it must be of type int"),
        ("fedprox.mu=true", "fedprox.mu is True; it must be of type float"),
        ('lenet="mlp"', "lenet is a group of settings; give lenet.NAME"),
    ):
        assert message(overrides.override, config, [pair]).startswith(line)
    overrides.override(config, ["fedprox={}"])
    assert config.fedprox.mu == 1e-3
