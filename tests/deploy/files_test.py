"""Lost files and full disks."""

import pytest

from fedjax_pfl.deploy import run
from fedjax_pfl.runs import run_directory
from tests.commands import message
from tests.deploy.run_test import CONFIG, Nodes

TWO_ROUNDS = {**CONFIG, "rounds": 2, "evaluate_after": False}


@pytest.mark.slow("three runs of nodes")
def test_a_run_whose_name_is_lost_does_not_enrol_its_nodes_again(tmp_path):
    """Under another name nodes would send their sums again."""
    with pytest.raises(KeyboardInterrupt):  # during the second round
        Nodes(tmp_path, 3, until=3 + 2 + 3 + 1).run(TWO_ROUNDS, tmp_path / "run")
    name = (tmp_path / "run" / run.DEPLOYED_FILE).rename(tmp_path / "kept")
    nodes = Nodes(tmp_path, 3)
    line = message(nodes.run, TWO_ROUNDS, tmp_path / "run")
    assert "deployed.json is missing or incomplete" in line
    assert nodes.responses == []
    name.rename(tmp_path / "run" / run.DEPLOYED_FILE)
    done = nodes.run(TWO_ROUNDS, tmp_path / "run")
    assert done.resumed_at == 1
    line = message(nodes.run, {**TWO_ROUNDS, "rounds": 3}, tmp_path / "run")
    assert "cannot be made longer, because its nodes keep" in line


def test_a_full_disk_at_the_start_of_a_run_is_a_usage_error(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory, "write_provenance", full)
    line = message(Nodes(tmp_path, 3).run, TWO_ROUNDS, tmp_path / "run")
    assert "cannot be written" in line
    assert ": free space on its disk" in line
