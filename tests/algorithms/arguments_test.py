"""Wrong arguments of factories, training, partition and simulation: one line, at the call."""

import inspect

import numpy as np
import pytest

import fedjax_pfl as pfl
from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.core.errors import UsageError
from tests import tiny

TRAINING = pfl.local_sgd()


def wrong(call, *arguments, **keywords):
    with pytest.raises(UsageError) as error:
        call(*arguments, **keywords)
    assert "\n" not in str(error.value)
    return str(error.value)


class TorchLike:
    """Like a PyTorch module: `apply` without `init`."""

    def apply(self, function):
        raise AssertionError


@pytest.mark.parametrize("name", METHODS)
def test_factories(name):
    factory, (_, federation) = getattr(pfl, name), tiny.federated()
    settings = [
        p.name for p in inspect.signature(factory).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    assert factory is METHODS[name].factory
    assert factory.__doc__
    assert "arguments_test.TorchLike; docs/" in wrong(factory, TorchLike(), TRAINING, federation)
    assert "class TinyNetwork; call" in wrong(factory, tiny.Net, TRAINING, federation)
    assert "give data.federation" in wrong(factory, tiny.Net(), TRAINING, tiny)
    assert "local_sgd(" in wrong(factory, tiny.Net(), None, federation)
    assert wrong(factory, tiny.Net(), TRAINING) == f"{name} needs federation"
    for setting in settings:
        error = wrong(factory, tiny.Net(), TRAINING, federation, **{f"{setting}_": 1})
        assert f"did you mean {setting!r}?" in error
        assert error.endswith(", ".join(settings))
        if inspect.signature(factory).parameters[setting].annotation in (int, int | None):
            error = wrong(factory, tiny.Net(), TRAINING, federation, **{setting: 1.5})
            assert error == f"{name}.{setting} is 1.5; it must be an integer"


@pytest.mark.parametrize("name", METHODS)
def test_networks_must_be_as_many_as_groups_of_clients(name):
    """A client whose group has no network would never train."""
    factory, (_, federation) = getattr(pfl, name), tiny.federated()
    networks = (tiny.Net(), tiny.Net())
    error = wrong(factory, networks, TRAINING, federation)
    if next(iter(inspect.signature(factory).parameters)) != "models":
        assert error.startswith(f"{name} takes one network, got a tuple of 2; ")
        return
    assert error.startswith(f"{name} takes a network for each group of clients, got 2 for 1 group;")
    three = federation._replace(groups=np.arange(federation.clients) % 3)
    assert "got 2 for 3 groups" in wrong(factory, networks, TRAINING, three)
    assert "got 0 for 1 group;" in wrong(factory, (), TRAINING, federation)


@pytest.mark.parametrize("name", ["fedavg", "pfedhn", "fedproto"])
def test_factories_take_keywords(name):
    """Some methods accept several networks and call the argument `models`."""
    factory, (_, federation) = getattr(pfl, name), tiny.federated()
    first = next(iter(inspect.signature(factory).parameters))
    network = tiny.Net() if name != "fedproto" else pfl.networks.MLP(outputs=2, hidden=(3,))
    factory(training=TRAINING, federation=federation, **{first: network})
    assert "call it first" in wrong(
        factory, training=TRAINING, federation=federation, **{first: tiny.Net}
    )


def test_the_nearest_keyword():
    data = pfl.datasets.digits()
    assert wrong(pfl.local_sgd, lr=0.1).startswith(
        "local_sgd has no argument 'lr'; did you mean 'learning_rate'? it takes learning_rate"
    )
    assert "'epochs'?" in wrong(pfl.local_training, None, local_epochs=1)
    assert "'mu'?" in wrong(pfl.fedprox, tiny.Net(), TRAINING, None, m=0.1)
    assert "'momentum'?" in wrong(pfl.local_sgd, momentum_=0.1)
    assert "too many positional" in wrong(pfl.local_sgd, 0.1, 5)
    assert "got 'num_clients'; did you mean 'clients'?" in wrong(
        pfl.partition, data, "classes", num_clients=10, per_client=4
    )
    assert "'per_client'?" in wrong(pfl.partition, data, "classes", clients=10, per_clients=4)
    assert "'test_fraction'?" in wrong(pfl.partition, data, "iid", clients=10, tests_fraction=0.2)
    assert "did you mean dirichlet?" in wrong(pfl.partition, data, "diriclet", clients=10)
    assert "'clients_per_round'?" in wrong(pfl.Simulation, None, data, clients_per_rounds=2)
    assert inspect.signature(pfl.local_sgd).parameters["epochs"].default is None
