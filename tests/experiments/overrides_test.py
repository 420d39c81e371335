"""Settings changed by --set."""

from experiments import overrides
from fedjax_pfl.settings import configuration
from tests.commands import message


def test_values_on_the_command_line():
    """JSON, numbers as people write them, words with quotes and without."""
    made = configuration.default()
    made.clients_per_round = 3
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
    assert message(overrides.override, made, pairs[-1:]).startswith(
        "--set=learning_rate_drops=[.5] is"
    )
    overrides.override(made, [*pairs[:-1], "learning_rate_drops=[0.5]"])
    assert (made.momentum, made.clip_norm, made.rounds) == (0.9, 10.0, 7)
    assert (made.model, made.dataset) == ("mlp", "mnist")
    assert (made.augment, made.evaluate_after, made.clients_per_round) == (True, False, None)
    assert (made.fedprox.mu, tuple(made.learning_rate_drops)) == (1e-3, (0.5,))
    for pair in ("momentum=much", "momentum", "lenet=mlp", "rounds=.5", "augment=yes"):
        line = message(overrides.override, made, [pair])
        assert line == f"--set={pair} is no KEY=VALUE of this configuration"
