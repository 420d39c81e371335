"""Invalid and lost files: node files, run files, keys, and the name of a run."""

import json

import pytest

from fedjax_pfl.deploy import run
from fedjax_pfl.runs import run_directory
from tests.commands import message
from tests.deploy.run_test import CONFIG, Nodes

TWO_ROUNDS = {**CONFIG, "rounds": 2, "evaluate_after": False}


def test_a_trial_finds_errors_in_a_nodes_file_before_it_starts(tmp_path):
    pytest.importorskip("flwr")
    from fedjax_pfl.deploy import trial

    config, path = {"dataset": "digits", "clients": 2, "partition": "iid"}, tmp_path / "node.json"
    assert "No such file" in message(trial._node_settings, 0, config, [str(path)])
    path.write_text("{")
    line = message(trial._node_settings, 0, config, [str(path)])
    assert line.startswith(f"{path} cannot be read as JSON")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"waiting": {"second": 3}}, "run.json.waiting must be an object without fields but"),
        ({"waiting": {"seconds": "long"}}, "waiting.seconds must be a number"),
        ({"waiting": {"min_answers": 1.5}}, "waiting.min_answers must be a whole number"),
        ({"workdir": 5}, "workdir must be text"),
        ({"log": None}, "log must be text"),
        ({"config": {"clients": "3"}}, "clients is '3'"),
        ({"config": []}, "config must be an object"),
    ],
)
def test_errors_in_a_runs_file(changes, line, tmp_path):
    pytest.importorskip("flwr")
    from fedjax_pfl.deploy import flower

    content = {"config": CONFIG, "workdir": str(tmp_path / "run"), "log": str(tmp_path / "run.log")}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**content, **changes}))
    assert line in message(flower.run_from_file, None, str(path))
    assert "absent.json is missing" in message(
        flower.run_from_file, None, str(tmp_path / "absent.json")
    )


def test_damaged_keys_are_named_and_damaged_certificates_replaced(tmp_path, monkeypatch):
    """A trial was killed while it wrote them, or they have expired."""
    pytest.importorskip("flwr")
    from fedjax_pfl.deploy import keys

    private = tmp_path / "client-0.key"
    content = keys.ensure_node_key(private).read_bytes()
    keys.ensure_node_key(private).unlink()
    assert keys.ensure_node_key(private).read_bytes() == content
    private.write_bytes(b"")
    assert "client-0.key is damaged" in message(keys.ensure_node_key, private)
    for path in keys.ensure_certificates(tmp_path):
        path.write_bytes(b"")
        paths = keys.ensure_certificates(tmp_path)
        files = [path.read_bytes() for path in paths]
        assert all(files)
        keys.ensure_certificates(tmp_path)
        assert files == [path.read_bytes() for path in paths]
    monkeypatch.setattr(keys, "_DAYS", 0)
    (tmp_path / "ca.crt").unlink()
    old = keys.ensure_certificates(tmp_path)[0].read_bytes()
    assert keys.ensure_certificates(tmp_path)[0].read_bytes() != old


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
