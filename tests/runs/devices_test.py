"""Which devices a run uses."""

import jax
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.simulation.execution_plan import mesh

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


def test_a_cpu_has_no_more_devices_than_clients_of_a_round_unless_told():
    assert mesh(None, 3, several=False).size == 3
    assert mesh(None, 1, several=False) is None
    assert mesh(4, 3, several=False).size == 4


def test_several_runs_keep_to_one_cpu_device_where_xla_would_end_the_process(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.11.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert mesh(None, 3, several=True) is None
    assert mesh(None, 3, several=False).size == 3
    with pytest.raises(UsageError, match=r"JAX 0\.11\.2 cannot compile several runs .* devices=1"):
        mesh(2, 3, several=True)
