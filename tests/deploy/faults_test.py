"""What goes wrong with a message, a disk or a process: nothing is lost or counted twice."""

import errno
import hashlib
import os
import random
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.deploy import server, storage, wire
from fedjax_pfl.deploy.programs import Method, ServerPrograms, single_client
from fedjax_pfl.deploy.schema import InvalidError
from fedjax_pfl.runs import checkpoints
from tests import cases, tiny
from tests.deploy.loopback import Loopback, answer, loopback

DATA, FEDERATION = tiny.federated(clients=4)
METHOD = Method(cases.make("fedper", FEDERATION), FEDERATION, 7, evaluate_after=False)
_made: list[Loopback] = []


@pytest.fixture
def made(tmp_path: Path) -> Loopback:
    """The programs are compiled once; folders and messages are each test's own."""
    if not _made:
        _made.append(loopback(METHOD, DATA, 4, tmp_path))
    clients = {
        i: one._replace(disk=storage.ClientDisk(tmp_path / f"own-{i}"))
        for i, one in _made[0].clients.items()
    }
    return _made[0]._replace(clients=clients, messages=[])


def files(made: Loopback) -> dict[str, bytes]:
    return {
        f"{i}/{path.name}": path.read_bytes()
        for i, one in made.clients.items()
        for path in sorted(one.disk.folder.glob("*"))
    }


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(InvalidError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def changed(content: bytes, tree: str = "", /, **facts: Any) -> bytes:
    """The same message with other facts, or with another array under a name."""
    found = wire.decode(content, len(content))
    trees: dict[str, dict[str, Any]] = {}
    for name, array in found.arrays.items():
        word, _, rest = name.partition("/")
        trees.setdefault(word, {})[rest] = facts.pop("array") if name == tree else array
    return wire.encode({**found.facts, **facts}, trees, found.envelope)


def test_a_message_comes_back_as_it_was_and_nothing_else_is_read():
    sent = {
        "w": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": np.array(True),
        "e": np.ones((0, 2)),
    }
    content = wire.encode({"round": 3}, {"payload": sent}, {"start": 1})
    found = wire.decode(content, len(content))
    assert (found.facts, found.envelope) == ({"round": 3}, {"start": 1})
    chex.assert_trees_all_equal(wire.read_tree(found, "payload", sent), sent)
    again = wire.encode({"round": 3}, {"payload": sent}, {"start": 2})
    assert again != content
    assert wire.decode(again, len(again)).digest == found.digest
    template = {**sent, "w": sent["w"].astype(np.float32)}
    for wrong in (
        template,
        {"w": sent["w"]},
        {**sent, "more": sent["b"]},
        {**sent, "w": sent["w"].T},
    ):
        with pytest.raises(InvalidError):
            wire.read_tree(found, "payload", wrong)
    with pytest.raises(InvalidError, match="bytes"):
        wire.decode(content, len(content) - 1)


def test_no_byte_that_is_changed_cut_or_added_raises_anything_else():
    content = wire.encode({"round": 3}, {"upload": {"w": np.ones(3, np.float32)}}, {"start": 1})
    draw, said = random.Random(0), set()
    for _ in range(2000):
        broken = bytearray(content)
        at = draw.randrange(len(broken))
        how = draw.randrange(3)
        if how == 0:
            broken[at] = draw.randrange(256)
        elif how == 1:
            del broken[at : at + draw.randrange(1, 9)]
        else:
            broken[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
        try:
            wire.decode(bytes(broken), len(content) + 9)
        except InvalidError as error:
            said.add(str(error))
    assert len(said) > 10
    assert not any("\n" in line for line in said)


def test_a_request_that_comes_again_gets_the_same_bytes_and_is_not_trained_twice(
    made: Loopback, monkeypatch: pytest.MonkeyPatch
):
    server_state = server.initial_state(made.server)
    opened = server.open_round(made.server, server_state, 0)
    answers = made.ask(opened.requests)
    there = files(made)
    later = made.server._replace(start=1)  # a server that was killed, and asks again
    again = server.open_round(later, server_state, 0)
    assert again.digests == opened.digests
    monkeypatch.setattr(type(made.clients[0].programs), "train", None)
    assert made.ask(opened.requests) == answers == made.ask(again.requests)
    assert files(made) == there


def test_replayed_and_reordered_requests_change_nothing(made: Loopback):
    server_state = server.initial_state(made.server)
    old: list[tuple[int, bytes]] = []
    for t in range(4):
        opened = server.open_round(made.server, server_state, t)
        old += opened.requests.items()
        server_state, _ = made.round(server_state, t)
    there = files(made)
    draw, said = random.Random(1), set()
    for _ in range(1000):
        i, content = draw.choice(old)
        newest = content in dict(old[-4:]).values()
        to = i if newest or draw.random() < 0.7 else (i + 1) % 4
        if newest:  # the last one is answered again, by the same bytes
            answer(made.clients[i], content)
        else:
            said.add(refused(answer, made.clients[to], content).partition(" for this")[0])
    assert files(made) == there
    assert {"round 0 is over", "round 1 is over", "round 2 is over"} <= said


def test_requests_for_others_or_out_of_order_are_refused(made: Loopback):
    opened = server.open_round(made.server, server.initial_state(made.server), 0)
    assert refused(answer, made.clients[0], opened.requests[1]).startswith("it is for client 1")
    other = changed(opened.requests[0], run="2e1b")
    assert refused(answer, made.clients[0], other) == "it belongs to another run"
    late = changed(opened.requests[0], settled=0)
    found = wire.decode(opened.requests[0], len(opened.requests[0]))
    for content in (late, wire.encode(found.facts)):  # the second says no start of the server
        assert "it names no start" in refused(answer, made.clients[0], content)
    assert files(made) == {}


def test_answers_that_are_not_those_asked_for_are_refused(made: Loopback):
    server_state = server.initial_state(made.server)
    opened = server.open_round(made.server, server_state, 0)
    answers = made.ask(opened.requests)
    good = answers[0]
    like = next(iter(wire.decode(good, len(good)).arrays))
    one = wire.decode(good, len(good)).arrays[like]
    wrong = {
        "of another round": changed(good, round=1),
        "of another run": changed(good, run="other"),
        "of another client": answers[1],
        "in another's name": changed(answers[1], client=0),
        "to another request": changed(good, request="0" * 64),
        "an evaluation": changed(good, kind="evaluate"),
        "of another shape": changed(good, like, array=np.zeros((*one.shape, 2), one.dtype)),
        "of another type": changed(good, like, array=one.astype(np.float64)),
        "too large": good + b"\0" * 2_000_000,
        "cut off": good[:-1],
        "nothing": b"",
        "an object": b"\x80\x04cos\nsystem\n",
    }
    for what, content in wrong.items():
        assert refused(server.read_update, made.server, opened, 0, content), what
    assert server.read_update(made.server, opened, 0, good).accepted


@pytest.mark.parametrize("what", ["nan", "large", "says so"])
def test_an_upload_that_is_not_fine_is_rejected_billed_and_changes_nothing(
    made: Loopback, what: str
):
    server_state = server.initial_state(made.server)
    opened = server.open_round(made.server, server_state, 0)
    answers = made.ask(opened.requests)
    found = wire.decode(answers[0], len(answers[0]))
    name = next(n for n in found.arrays if n.startswith("upload/") and "kernel" in n)
    value = {"nan": np.nan, "large": np.inf, "says so": 0.0}[what]
    bad = changed(answers[0], name, array=found.arrays[name] + np.float32(value))
    if what == "says so":
        bad = changed(answers[0], finite=False)
    came = {
        i: server.read_update(made.server, opened, i, c) for i, c in {**answers, 0: bad}.items()
    }
    assert not came[0].accepted
    without = {i: one for i, one in came.items() if i}
    evaluate_after, (log,) = server.close_round(made.server, server_state, opened, came)
    absent, _ = server.close_round(made.server, server_state, opened, without)
    chex.assert_trees_all_equal(jax.device_get(evaluate_after.state), jax.device_get(absent.state))
    assert log.rejected.tolist() == [[True, False, False, False]]
    assert all(bytes_up[0, 0] > 0 for bytes_up in log.up.values())
    assert evaluate_after.settled.tolist() == [storage.BEFORE_FIRST_ROUND, 0, 0, 0]


def test_an_upload_that_changes_too_much_is_rejected(made: Loopback):
    """A norm between the least and the largest change of the four takes some and not others."""
    server_state = server.initial_state(made.server)
    opened = server.open_round(made.server, server_state, 0)
    answers = made.ask(opened.requests)
    came = {
        i: server.read_update(made.server, opened, i, content) for i, content in answers.items()
    }
    moved = {
        i: float(jnp.sqrt(trees.squared_norm(trees.change(opened.payloads[i], one.upload))))
        for i, one in came.items()
    }
    least, *_, most = sorted(moved.values())
    limit = (least + most) / 2
    judged = ServerPrograms(METHOD._replace(max_update_norm=limit), single_client(DATA, 0), 4)
    strict = made.server._replace(programs=judged)
    fine = {
        i: server.read_update(strict, opened, i, content).accepted for i, content in answers.items()
    }
    assert fine == {i: size <= limit for i, size in moved.items()}


def test_a_model_that_is_not_finite_does_not_count_where_nothing_travels(tmp_path: Path):
    """The server sees no upload of Local: it is the node that looks at its own model."""
    x = np.array(DATA.x)
    x[np.asarray(DATA.train.rows)[0, : tiny.TRAIN[0]]] = np.nan
    local = Method(cases.make("local", FEDERATION), FEDERATION, 7, evaluate_after=False)
    alone = loopback(local, DATA._replace(x=x), 4, tmp_path)
    server_state, (log,) = alone.round(server.initial_state(alone.server), 0)
    assert log.rejected.tolist() == [[True, False, False, False]]
    assert server_state.settled.tolist() == [storage.BEFORE_FIRST_ROUND, 0, 0, 0]
    chex.assert_tree_all_finite(alone.client_state(server_state, 0))


def test_who_did_not_count_goes_on_from_what_did(made: Loopback):
    server_state, _ = made.round(server.initial_state(made.server), 0)
    before = made.client_state(server_state, 0)
    server_state, _ = made.round(server_state, 1, absent=lambda i: i == 0)
    chex.assert_trees_all_equal(made.client_state(server_state, 0), before)
    server_state, _ = made.round(server_state, 2)
    assert made.clients[0].disk.rounds() == [2, 0]
    assert made.clients[1].disk.rounds() == [2, 1, 0]


def test_a_crash_between_saving_and_answering_loses_nothing(
    made: Loopback, monkeypatch: pytest.MonkeyPatch
):
    server_state = server.initial_state(made.server)
    opened = server.open_round(made.server, server_state, 0)
    wanted = answer(made.clients[0], opened.requests[0])
    there = files(made)
    for path in made.clients[0].disk.folder.iterdir():
        path.unlink()

    class Killed(BaseException):
        pass

    def before(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as at_first:
        at_first.setattr(os, "replace", before)  # it dies while it writes
        with pytest.raises(Killed):
            answer(made.clients[0], opened.requests[0])
    assert made.clients[0].disk.rounds() == []
    with monkeypatch.context() as at_last:
        at_last.setattr(storage.ClientDisk, "rounds", before)  # it dies when it has written
        disk = storage.ClientDisk(made.clients[0].disk.folder)
        visited = storage.RoundRecord(0, 0, opened.digests[0], wanted, b"")
        with pytest.raises(Killed):
            disk.write(visited, storage.BEFORE_FIRST_ROUND)
    monkeypatch.setattr(type(made.clients[0].programs), "train", None)
    assert answer(made.clients[0], opened.requests[0]) == wanted
    assert there.keys() <= files(made).keys()


def test_a_full_disk_is_one_line_and_the_client_takes_part_again(
    made: Loopback, monkeypatch: pytest.MonkeyPatch
):
    server_state, _ = made.round(server.initial_state(made.server), 0)
    there = files(made)
    opened = server.open_round(made.server, server_state, 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as now:
        now.setattr(os, "fsync", full)
        assert "No space left" in refused(answer, made.clients[0], opened.requests[0])
    assert files(made) == there
    assert answer(made.clients[0], opened.requests[0])


def test_a_damaged_file_is_named_and_not_read(made: Loopback):
    server_state, _ = made.round(server.initial_state(made.server), 0)
    path = made.clients[0].disk.folder / "visit-000000000"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    opened = server.open_round(made.server, server_state, 1)
    assert "visit-000000000 is damaged" in refused(answer, made.clients[0], opened.requests[0])
    header = b'{"answer_bytes": -1, "request": "", "round": 0, "start": 0}\n'
    path.write_bytes(hashlib.sha256(header).hexdigest().encode() + b"\n" + header)
    assert "visit-000000000.request must be" in refused(answer, made.clients[0], opened.requests[0])
    path.unlink()
    assert "does not hold round 0" in refused(answer, made.clients[0], opened.requests[0])


def test_a_damaged_visit_that_has_not_counted_is_trained_again(made: Loopback):
    server_state, _ = made.round(server.initial_state(made.server), 0)
    opened = server.open_round(made.server, server_state, 1)
    wanted = answer(made.clients[0], opened.requests[0])
    (made.clients[0].disk.folder / "visit-000000001").write_bytes(b"")
    assert answer(made.clients[0], opened.requests[0]) == wanted


def test_a_server_goes_on_from_its_checkpoint_with_the_same_bits(made: Loopback, tmp_path: Path):
    """Killed after a round that was not saved: the round is asked for again, and is the same."""
    server_state, _ = made.round(server.initial_state(made.server), 0)
    store = checkpoints.open_store(tmp_path / "checkpoints")
    store.save(1, {"state": server_state.state, "settled": server_state.settled}, {})
    lost, _ = made.round(server_state, 1)
    found = store.restore(
        1, {"state": made.server.programs.shapes[0].state, "settled": server_state.settled}
    )
    restarted = made._replace(server=made.server._replace(start=1))
    back = server.ServerState(found["state"], found["settled"])
    again, _ = restarted.round(back, 1)
    chex.assert_trees_all_equal(jax.device_get(again.state), jax.device_get(lost.state))
    for i in made.clients:
        chex.assert_trees_all_equal(restarted.client_state(again, i), made.client_state(lost, i))
    opened = server.open_round(made.server, again, 2)  # of the start before, which still runs
    for i, content in restarted.ask(server.open_round(restarted.server, again, 2).requests).items():
        assert content
        assert answer(made.clients[i], opened.requests[i]) == content  # the same question
    late = server.open_round(made.server, again, 3)
    assert "earlier start" in refused(answer, made.clients[0], late.requests[0])


def test_a_server_that_goes_back_takes_its_clients_along(made: Loopback):
    """Its newest checkpoint is damaged: clients still have what they had a round before."""
    server_state = server.initial_state(made.server)
    each = [server_state]
    for t in range(3):
        server_state, _ = made.round(server_state, t)
        each.append(server_state)
    restarted = made._replace(server=made.server._replace(start=1))
    back, _ = restarted.round(each[1], 1)
    chex.assert_trees_all_equal(jax.device_get(back.state), jax.device_get(each[2].state))
    for i in made.clients:
        chex.assert_trees_all_equal(restarted.client_state(back, i), made.client_state(each[2], i))


def test_what_is_a_clients_own_is_in_no_message(tmp_path: Path):
    """A planted number in the head that stays at home, and in the examples of each client."""
    marks = [np.float32(1234.5678 + i) for i in range(4)]
    x = np.array(DATA.x)
    for i in range(4):
        x[np.asarray(DATA.train.rows[i])[0], 0] = marks[i]
    made = loopback(METHOD, DATA._replace(x=x), 4, tmp_path)
    server_state, _ = made.round(server.initial_state(made.server), 0)
    for i in range(4):  # as if local training had found such numbers
        disk = made.clients[i].disk
        visited = disk.read(0)
        own = storage.decode_state(visited.state, made.clients[i].programs.shapes.client)
        own = jax.tree.map(lambda leaf, m=marks[i]: np.full_like(leaf, m), own)
        disk.write(visited._replace(state=storage.encode_state(own)), 0)
        held = b"".join(path.read_bytes() for path in disk.folder.iterdir())
        assert marks[i].tobytes() in held
    opened = server.open_evaluation(made.server, server_state, 1, range(4))
    made.ask(opened.requests)
    made.round(server_state, 1)
    assert len(made.messages) == 4 * 2 * 3
    for content in made.messages:
        for mark in marks:
            assert mark.tobytes() not in content
            assert str(mark).encode() not in content


def test_names_of_the_requests_digest_is_all_but_the_envelope(made: Loopback):
    opened = server.open_round(made.server, server.initial_state(made.server), 0)
    for i, content in opened.requests.items():
        found = wire.decode(content, len(content))
        body = content[content.index(b'{"arrays"') - 8 :]
        assert found.digest == hashlib.sha256(body).hexdigest() == opened.digests[i]
