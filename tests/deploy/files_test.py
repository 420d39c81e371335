"""Invalid and lost files: node files, run files, keys, and the name of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import node_file, run
from fedjax_pfl.runs import run_directory
from tests.deploy.run_test import CONFIG, Nodes

TWO_ROUNDS = {**CONFIG, "rounds": 2, "evaluate_after": False}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must be an object"),
        ("\xff", "cannot be read as JSON"),
        ('{"dataset": "csv:x", "code": 5}', "code must be a list"),
        ('{"dataset": "csv:x", "client": "0"}', "client must be a whole number"),
        ('{"dataset": {"a": 1}}', "dataset is"),
        ('{"dataset": "nope"}', "there is no dataset 'nope'"),
        ('{"dataset": "csv:x", "csv": 5}', "csv is a group"),
        ('{"dataset": "csv:x", "split": "all"}', "split is 'all'"),
        ('{"dataset": "csv:x", "labels": ["a", "a"]}', "a word of labels twice"),
        ('{"dataset": "csv:x", "words": {"city": ["a", "a"]}}', "a word of city twice"),
    ],
)
def test_errors_in_a_nodes_file_are_found_when_it_is_read(text: str, line: str, tmp_path: Path):
    """The node and a trial find the error before they start anything."""
    pytest.importorskip("flwr")
    from fedjax_pfl.deploy import trial

    path = tmp_path / "node.json"
    path.write_text(text, encoding="latin-1")
    config = {"dataset": "digits", "clients": 2, "partition": "iid"}
    for read in (
        lambda: node_file.read(path),
        lambda: trial._node_settings(0, config, [str(path)]),
    ):
        with pytest.raises(UsageError, match=line) as error:
            read()
        assert str(error.value).startswith(str(path))
    with pytest.raises(UsageError, match="No such file"):
        trial._node_settings(0, config, [str(tmp_path / "absent.json")])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"waiting": {"second": 3}}, r"run\.json\.waiting must be an object without fields but"),
        ({"waiting": {"seconds": "long"}}, "waiting.seconds must be a number"),
        ({"waiting": {"least": 1.5}}, "waiting.least must be a whole number"),
        ({"workdir": 5}, "workdir must be text"),
        ({"log": None}, "log must be text"),
        ({"config": {"clients": "3"}}, "clients is '3'"),
        ({"config": []}, "config must be an object"),
    ],
)
def test_errors_in_a_runs_file(changes: Any, line: str, tmp_path: Path):
    pytest.importorskip("flwr")
    from fedjax_pfl.deploy import flower

    content = {"config": CONFIG, "workdir": str(tmp_path / "run"), "log": str(tmp_path / "run.log")}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**content, **changes}))
    with pytest.raises(UsageError, match=line):
        flower.run_from_file(None, str(path))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"absent\.json is missing"):
        flower.run_from_file(None, str(tmp_path / "absent.json"))  # type: ignore[arg-type]


def test_a_second_key_for_a_name_is_refused(tmp_path: Path):
    """It cannot replace the first one later either."""
    pytest.importorskip("flwr")
    from tests.deploy.flower_test import NODES, Grid, make_exchange, node_ids

    first, second = (7, NODES[0], b"a", "online"), (9, NODES[0], b"z", "online")
    exchange, log_lines = make_exchange(Grid(first, second), tmp_path)
    assert node_ids(exchange) == {0: 7}
    again, _ = make_exchange(Grid(second, first), tmp_path)
    assert node_ids(again) == {0: 7}
    assert node_ids(make_exchange(Grid(second), tmp_path)[0]) == {}
    assert log_lines == ["client-0 has another key than before, or another client's: refused"]


def test_damaged_keys_are_named_and_damaged_certificates_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A trial was killed while it wrote them, or they have expired."""
    pytest.importorskip("flwr")
    from fedjax_pfl.deploy import keys

    private = tmp_path / "client-0.key"
    content = keys.ensure_node_key(private).read_bytes()
    keys.ensure_node_key(private).unlink()
    assert keys.ensure_node_key(private).read_bytes() == content
    private.write_bytes(b"")
    with pytest.raises(UsageError, match=r"client-0\.key is damaged"):
        keys.ensure_node_key(private)
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


def test_a_run_whose_name_is_lost_does_not_enrol_its_nodes_again(tmp_path: Path):
    """Under another name nodes would send their sums again."""
    nodes = Nodes(tmp_path, 3, until=3 + 2 + 3 + 1)  # in the midst of the second round
    with pytest.raises(KeyboardInterrupt):
        run.run(TWO_ROUNDS, tmp_path / "run", nodes, log=nodes.log_lines.append)
    name = (tmp_path / "run" / run.DEPLOYED_FILE).rename(tmp_path / "kept")
    nodes = Nodes(tmp_path, 3)
    with pytest.raises(UsageError, match=r"deployed\.json is missing or incomplete"):
        run.run(TWO_ROUNDS, tmp_path / "run", nodes, log=nodes.log_lines.append)
    assert nodes.responses == []
    name.rename(tmp_path / "run" / run.DEPLOYED_FILE)
    done = run.run(TWO_ROUNDS, tmp_path / "run", nodes, log=nodes.log_lines.append)
    assert done.resumed_at == 1
    with pytest.raises(UsageError, match="cannot be made longer, because its nodes keep"):
        run.run({**TWO_ROUNDS, "rounds": 3}, tmp_path / "run", nodes, log=nodes.log_lines.append)


def test_a_full_disk_at_the_start_of_a_run_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory, "write_provenance", full)
    with pytest.raises(UsageError, match=r"cannot be written .*: free space on its disk"):
        run.run(TWO_ROUNDS, tmp_path / "run", Nodes(tmp_path, 3))
