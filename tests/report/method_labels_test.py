"""Tests of the labels of methods and of their changed settings."""

import pytest

from fedjax_pfl.algorithms import METHODS
from fedjax_pfl.report import method_labels, page, run_reader
from fedjax_pfl.settings import configuration
from tests.report.page_test import evaluation, make_run, work

DEFAULTS = run_reader.default_settings()


def read(**changes):
    """Returns settings as a run directory stores them."""
    return run_reader.as_json(configuration.resolve(configuration.complete(changes)))


def test_label_of_built_in_and_user_defined_methods():
    assert method_labels.table_label("lg_fedavg") == "LG-FedAvg"
    assert method_labels.table_label("mine") == "mine"
    assert method_labels.label(read(algorithm="lg_fedavg")) == (
        "LG-FedAvg, the method of Liang et al. 2020"
    )
    assert method_labels.label({"algorithm": "mine"}) == "mine, a method of your own"


def test_label_of_several_phases():
    config = read(algorithm="fedmn", phases=({"algorithm": "fedavg"}, {}, {"rounds": 3}))
    assert method_labels.label(config) == (
        "FedAvg, the method of McMahan et al. 2017, then FedMN, the method of Wang et al. 2022"
    )
    assert method_labels.title(config) == "FedAvg, then FedMN"


def test_changes_hold_settings_of_method_and_training():
    unused = {"fedprox": {"mu": 3.0}, "fraction": 0.5}
    training = {"rounds": 7, "local_epochs": 5, "learning_rate": 0.05, "keep_head": True}
    config = read(algorithm="ditto", ditto={"penalty": 2.0}, **training, **unused)
    expected = [f"{name}={value}" for name, value in training.items()]
    assert method_labels.changes(config, DEFAULTS) == ["ditto.penalty=2.0", *expected]
    assert method_labels.changes(read(), DEFAULTS) == []
    assert method_labels.changes({"algorithm": "mine", "mine": {"a": 1}}, DEFAULTS) == []


def test_changes_of_phases():
    phases = ({"algorithm": "fedprox", "fedprox": {"mu": 1.0}}, {"momentum": 0.5})
    config = read(algorithm="fedmn", fedmn={"width": 64}, phases=phases)
    expected = ["fedprox.mu=1.0", "fedmn.width=64", "momentum=0.5"]
    assert method_labels.changes(config, DEFAULTS) == expected


def test_first_line_has_changes_of_all_runs():
    runs = [read(learning_rate=rate, momentum=0.9) for rate in (0.1, 0.2)]
    assert method_labels.first_line(runs, configuration.BUILTINS) == (
        "FedAvg, the method of McMahan et al. 2017; changed from the defaults: momentum=0.9"
    )
    assert method_labels.first_line([read()], configuration.BUILTINS) == (
        "FedAvg, the method of McMahan et al. 2017; "
        "all settings of the method and of training at their defaults"
    )


def test_first_line_of_a_user_defined_method():
    def mine(model, training, federation, *, strength: float = 1.0):
        """A method.

        Args:
          strength: how much.
        """

    builtins = configuration.BUILTINS
    registry = builtins._replace(algorithm={**builtins.algorithm, "mine": mine})
    config = read() | {"algorithm": "mine", "mine": {"strength": 2.0}}
    assert method_labels.first_line([config], registry) == (
        "mine, a method of your own; changed from the defaults: mine.strength=2.0"
    )


@pytest.mark.slow("a page of a run")
def test_page_head_has_methods_and_rounds_of_all_phases(tmp_path):
    phases = ({"rounds": 4}, {"algorithm": "local", "rounds": 2})
    config = work("fedavg", phases=phases)
    text = page.write(make_run(tmp_path, [evaluation(6)], config)).read_text()
    assert "<title>FedAvg, then Local on digits</title>" in text
    assert " · 4 clients · 6 rounds · " in text


@pytest.mark.slow("a page of a run")
def test_page_head_has_origin_and_changes(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "ditto", METHODS["ditto"]._replace(variant_of=METHODS["fedavg"]))
    config = work("ditto", ditto={"penalty": 2.0}, momentum=0.5)
    text = page.write(make_run(tmp_path, [evaluation(1)], config)).read_text()
    assert "<title>Ditto (variant of this library) on digits</title>" in text
    facts = text[text.index('<p class="facts">') :].partition("</p>")[0]
    assert ">Ditto, variant of this library (of FedAvg) · " in facts
    assert facts.endswith(
        " · changed from the defaults: ditto.penalty=2.0, clients=4, rounds=10, momentum=0.5"
    )
