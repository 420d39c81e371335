"""Fuzz test: a random configuration builds, or is refused in one line."""

import json

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import build
from fedjax_pfl.settings import configuration
from tests.settings.configuration_test import TINY

_ODD = [None, True, -1, 0, 1, 2, 3, 0.5, 1.0, -0.5, float("nan"), float("inf"), "x", (), (2,)]
_odd = st.sampled_from(_ODD)
_LIKELY = {
    "algorithm": ["fedavg", "local", "fedavgg"],
    "partition": [*configuration.PARTITIONS, "none"],
    "split": ["pooled", "official", "shared", "no"],
    "model": ["mlp", "small", "lenet"],
    "conv": ["auto", "xla", "rows"],
    "clients": [1, 2, 3, 5, 40],
    "held_out": [0, 1, 2],
    "clients_per_round": [1, 2, 4],
    "rounds": [1, 4],
    "eval_every": [1, 3],
    "test_fraction": [0.0, 0.2, 0.9],
    "validation_fraction": [0.0, 0.2],
    "validation_examples": [1, 10, 1000],
    "fraction": [0.01, 0.5, 1.0],
    "upload_bits": [2, 8],
    "upload_top_k": [0.1],
    "learning_rate_drops": [(0.5,), (0.5, 0.75), (2.0,), ("x",)],
    "groups": [({},), ({}, {"mlp": {"hidden": (2,)}}), ({"model": "x"},), (3,), ({"mlp": 3},)],
    "phases": [
        ({}, {"algorithm": "local"}),
        ({"rounds": 1}, {"learning_rate": 0.5}),
        ({"algorithm": "local"}, {}),
        ({"rounds": 0},),
        ("x",),
    ],
    "devices": [1, 2, 3],
    "chunk": [1, 2],
    "mlp": [{"hidden": v} for v in ((), (3,), (0,), (-1,), ("a",), (2, 2))],
    "small": [{"kernels": (2, 2)}, {"kernel_size": 0}, {"padding": "ODD"}],
    "dirichlet": [{"alpha": 0.01}, {"alpha": -1.0}],
    "classes": [{"per_client": 2, "examples": 4}, {"per_client": 0}, {"examples": 1}],
    "domains": [{"domains": 2}, {"domains": 9}],
    "synthetic": [{"examples": 5}, {"classes": 1}, {"test_examples": 20}, {"examples": -1}],
}
_DATA = ("synthetic", "dataset", "data_dir")  # sources have other tests
_SUB = {  # every setting of every sub-config
    name: {key for key, _ in sub.items()}
    for name, sub in configuration.default().items()
    if hasattr(sub, "items") and name not in _DATA
}
_overrides = st.fixed_dictionaries(
    {},
    optional={
        **{k: _odd for k in configuration.default() if k not in (*_LIKELY, *_SUB, *_DATA)},
        **{
            k: _odd | st.fixed_dictionaries({}, optional=dict.fromkeys(v, _odd))
            for k, v in _SUB.items()
            if k not in _LIKELY
        },
        **{k: st.sampled_from(v) | _odd for k, v in _LIKELY.items()},
    },
)


@st.composite
def _few(draw):
    """Returns at most four changes, because few configurations with more are valid."""
    changes = draw(_overrides)
    keys = draw(st.lists(st.sampled_from(sorted(changes)), max_size=4)) if changes else []
    return {key: changes[key] for key in keys}


@pytest.mark.slow("a hundred drawn configurations")
@hypothesis_settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(_few())
def test_random_configurations_build_or_are_refused_in_one_line(changes):
    settings = {**TINY, **changes}
    if isinstance(changes.get("synthetic"), dict):
        settings["synthetic"] = {**TINY["synthetic"], **changes["synthetic"]}
    experiment, line = None, ""
    try:
        experiment = build.build(configuration.complete(settings))
    except UsageError as error:
        line = str(error)
    assert "\n" not in line
    assert bool(line) != bool(experiment)
    if experiment:
        json.dumps(configuration.resolve(configuration.complete(settings)), allow_nan=False)
