"""Faults of messages, disks and processes: no round is lost or counted twice."""

import errno
import hashlib
import os
import random

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
from tests.deploy.loopback import loopback, respond

pytestmark = pytest.mark.slow("a node and its programs for each fault")

DATA, FEDERATION = tiny.federated(clients=4)
METHOD = Method(cases.make("fedper", FEDERATION), FEDERATION, 7, evaluate_after=False)
compiled = []


@pytest.fixture
def loop(tmp_path):
    """Compiles the programs once; each test gets its own folders and messages."""
    if not compiled:
        compiled.append(loopback(METHOD, DATA, 4, tmp_path))
    clients = {
        i: client._replace(disk=storage.ClientDisk(tmp_path / f"own-{i}"))
        for i, client in compiled[0].clients.items()
    }
    return compiled[0]._replace(clients=clients, messages=[])


def files(loop):
    return {
        f"{i}/{path.name}": path.read_bytes()
        for i, client in loop.clients.items()
        for path in sorted(client.disk.folder.glob("*"))
    }


def read_updates(loop, pending, responses):
    read = server.read_update
    return {i: read(loop.server, pending, i, content) for i, content in responses.items()}


def refusal(call, *arguments):
    with pytest.raises(InvalidError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def replace_parts(content, tree="", /, **facts):
    """Returns the message with other facts, or with another array under a name."""
    message = wire.decode(content, len(content))
    trees = {}
    for name, array in message.arrays.items():
        group, _, path = name.partition("/")
        trees.setdefault(group, {})[path] = facts.pop("array") if name == tree else array
    return wire.encode({**message.facts, **facts}, trees, message.envelope)


def test_a_message_decodes_to_what_was_encoded():
    arrays = {
        "w": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": np.array(True),
        "e": np.ones((0, 2)),
    }
    content = wire.encode({"round": 3}, {"payload": arrays}, {"start": 1})
    message = wire.decode(content, len(content))
    assert (message.facts, message.envelope) == ({"round": 3}, {"start": 1})
    chex.assert_trees_all_equal(wire.read_tree(message, "payload", arrays), arrays)
    repeated = wire.encode({"round": 3}, {"payload": arrays}, {"start": 2})
    assert repeated != content
    assert wire.decode(repeated, len(repeated)).digest == message.digest
    wrong = {"w": arrays["w"].astype(np.float32)}, {"more": arrays["b"]}, {"w": arrays["w"].T}
    for template in ({"w": arrays["w"]}, *({**arrays, **changes} for changes in wrong)):
        refusal(wire.read_tree, message, "payload", template)
    assert "bytes" in refusal(wire.decode, content, len(content) - 1)
    # The digest covers all but the envelope.
    body = content[content.index(b'{"arrays"') - 8 :]
    assert message.digest == hashlib.sha256(body).hexdigest()


def test_damaged_messages_only_raise_invalid_error():
    content = wire.encode({"round": 3}, {"upload": {"w": np.ones(3, np.float32)}}, {"start": 1})
    rng, messages = random.Random(0), set()
    for _ in range(2000):
        broken = bytearray(content)
        position = rng.randrange(len(broken))
        change = rng.randrange(3)
        if change == 0:
            broken[position] = rng.randrange(256)
        elif change == 1:
            del broken[position : position + rng.randrange(1, 9)]
        else:
            broken[position:position] = rng.randbytes(rng.randrange(1, 9))
        try:
            wire.decode(bytes(broken), len(content) + 9)
        except InvalidError as error:
            messages.add(str(error))
    assert len(messages) > 10
    assert not any("\n" in line for line in messages)


def test_a_repeated_request_gets_the_same_bytes_without_training(loop, monkeypatch):
    server_state, pending, responses = loop.first_round()
    files_before = files(loop)
    later = loop.server._replace(start=1)  # a server that was killed, and asks again
    again = server.open_round(later, server_state, 0)
    assert again.digests == pending.digests
    monkeypatch.setattr(type(loop.clients[0].programs), "train", None)
    assert loop.ask(pending.requests) == responses == loop.ask(again.requests)
    assert files(loop) == files_before


def test_another_request_for_the_newest_round_is_refused(loop):
    """A server could compare the uploads that two downloads lead to."""
    _, pending, _ = loop.first_round()
    files_before, content = files(loop), pending.requests[0]
    arrays = wire.decode(content, len(content)).arrays
    name = next(name for name in arrays if "kernel" in name)
    changed = replace_parts(content, name, array=2 * arrays[name])
    line = refusal(respond, loop.clients[0], changed)
    assert line == "round 0 is over for this client, which has been in 0"
    assert files(loop) == files_before


def test_replayed_and_reordered_requests_change_nothing(loop):
    server_state = server.initial_state(loop.server)
    old = []
    for t in range(4):
        pending = server.open_round(loop.server, server_state, t)
        old += pending.requests.items()
        server_state, _ = loop.round(server_state, t)
    files_before = files(loop)
    rng, messages = random.Random(1), set()
    for _ in range(1000):
        i, content = rng.choice(old)
        newest = content in dict(old[-4:]).values()
        to = i if newest or rng.random() < 0.7 else (i + 1) % 4
        if newest:  # the last one is answered again, by the same bytes
            respond(loop.clients[i], content)
        else:
            messages.add(refusal(respond, loop.clients[to], content).partition(" for this")[0])
    assert files(loop) == files_before
    assert {"round 0 is over", "round 1 is over", "round 2 is over"} <= messages


def test_requests_for_others_or_out_of_order_are_refused(loop):
    pending = server.open_round(loop.server, server.initial_state(loop.server), 0)
    assert refusal(respond, loop.clients[0], pending.requests[1]).startswith("it is for client 1")
    other_run = replace_parts(pending.requests[0], run="2e1b")
    assert refusal(respond, loop.clients[0], other_run) == "it belongs to another run"
    out_of_order = replace_parts(pending.requests[0], settled=0)
    message = wire.decode(pending.requests[0], len(pending.requests[0]))
    for content in (out_of_order, wire.encode(message.facts)):  # the second has no start
        assert "it names no start" in refusal(respond, loop.clients[0], content)
    assert files(loop) == {}


def test_responses_to_other_requests_are_refused(loop):
    _, pending, responses = loop.first_round()
    response = responses[0]
    array_name = next(iter(wire.decode(response, len(response)).arrays))
    array = wire.decode(response, len(response)).arrays[array_name]
    wrong_responses = {
        "of another round": replace_parts(response, round=1),
        "of another run": replace_parts(response, run="other"),
        "of another client": responses[1],
        "in another's name": replace_parts(responses[1], client=0),
        "to another request": replace_parts(response, request="0" * 64),
        "an evaluation": replace_parts(response, kind="evaluate"),
        "with a number as flag": replace_parts(response, finite=1),
        "of a round out of bounds": replace_parts(response, round=10**12),
        "with another field": replace_parts(response, more=1),
        "with text as client": replace_parts(response, client="0"),
        "of another shape": replace_parts(response, array_name, array=array[..., None]),
        "of another type": replace_parts(response, array_name, array=array.astype(np.float64)),
        "too large": response + b"\0" * 2_000_000,
        "cut off": response[:-1],
        "nothing": b"",
        "an object": b"\x80\x04cos\nsystem\n",
    }
    for name, content in wrong_responses.items():
        assert refusal(server.read_update, loop.server, pending, 0, content), name
    long = wire.encode({"kind": "refused", "why": "x" * 1001})
    line = refusal(server.read_update, loop.server, pending, 0, long)
    assert "message.why must be text" in line
    assert server.read_update(loop.server, pending, 0, response).accepted


def test_a_rejected_upload_is_counted_and_changes_nothing(loop):
    server_state, pending, responses = loop.first_round()
    arrays = wire.decode(responses[0], len(responses[0])).arrays
    name = next(n for n in arrays if n.startswith("upload/") and "kernel" in n)
    not_finite = (arrays[name] + np.float32(value) for value in (np.nan, np.inf))
    bad_responses = [replace_parts(responses[0], name, array=array) for array in not_finite]
    updates = read_updates(loop, pending, responses)
    absent = {i: update for i, update in updates.items() if i}
    expected, _ = server.close_round(loop.server, server_state, pending, absent)
    for bad in (*bad_responses, replace_parts(responses[0], finite=False)):
        updates |= read_updates(loop, pending, {0: bad})
        assert not updates[0].accepted
        after, (log,) = server.close_round(loop.server, server_state, pending, updates)
        chex.assert_trees_all_equal(jax.device_get(after.state), jax.device_get(expected.state))
        assert log.rejected.tolist() == [[True, False, False, False]]
        assert all(bytes_up[0, 0] > 0 for bytes_up in log.up.values())
        assert after.settled.tolist() == [storage.BEFORE_FIRST_ROUND, 0, 0, 0]


def test_an_upload_over_max_update_norm_is_rejected(loop):
    """A limit between the smallest and the largest change accepts only some uploads."""
    _, pending, responses = loop.first_round()
    norms = {}
    for i, update in read_updates(loop, pending, responses).items():
        change = trees.change(pending.payloads[i], update.upload)
        norms[i] = float(jnp.sqrt(trees.squared_norm(change)))
    limit = (min(norms.values()) + max(norms.values())) / 2
    programs = ServerPrograms(METHOD._replace(max_update_norm=limit), single_client(DATA, 0), 4)
    strict = loop._replace(server=loop.server._replace(programs=programs))
    updates = read_updates(strict, pending, responses)
    assert {i: update.accepted for i, update in updates.items()} == {
        i: norm <= limit for i, norm in norms.items()
    }


def test_a_client_without_upload_reports_a_model_that_is_not_finite(tmp_path):
    """Local uploads nothing, so only the node can check its model."""
    x = np.array(DATA.x)
    x[np.asarray(DATA.train.rows)[0, : tiny.TRAIN[0]]] = np.nan
    local = Method(cases.make("local", FEDERATION), FEDERATION, 7, evaluate_after=False)
    loop = loopback(local, DATA._replace(x=x), 4, tmp_path)
    server_state, (log,) = loop.round(server.initial_state(loop.server), 0)
    assert log.rejected.tolist() == [[True, False, False, False]]
    assert server_state.settled.tolist() == [storage.BEFORE_FIRST_ROUND, 0, 0, 0]
    chex.assert_tree_all_finite(loop.client_state(server_state, 0))


def test_an_absent_client_continues_from_its_last_counted_round(loop):
    server_state, _ = loop.round(server.initial_state(loop.server), 0)
    before = loop.client_state(server_state, 0)
    server_state, _ = loop.round(server_state, 1, absent=lambda i: i == 0)
    chex.assert_trees_all_equal(loop.client_state(server_state, 0), before)
    server_state, _ = loop.round(server_state, 2)
    assert loop.clients[0].disk.rounds() == [2, 0]
    assert loop.clients[1].disk.rounds() == [2, 1, 0]


def test_a_crash_between_saving_and_responding_loses_nothing(loop, monkeypatch):
    server_state = server.initial_state(loop.server)
    pending = server.open_round(loop.server, server_state, 0)
    expected = respond(loop.clients[0], pending.requests[0])
    files_before = files(loop)
    for path in loop.clients[0].disk.folder.iterdir():
        path.unlink()

    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)  # while it writes
        with pytest.raises(KeyboardInterrupt):
            respond(loop.clients[0], pending.requests[0])
    disk = loop.clients[0].disk
    assert disk.rounds() == []
    record = storage.RoundRecord(0, 0, pending.digests[0], expected, b"")
    with monkeypatch.context() as patch:
        patch.setattr(storage.ClientDisk, "rounds", kill)  # when it has written
        with pytest.raises(KeyboardInterrupt):
            disk.write(record, storage.BEFORE_FIRST_ROUND)
    monkeypatch.setattr(type(loop.clients[0].programs), "train", None)
    assert respond(loop.clients[0], pending.requests[0]) == expected
    assert files_before.keys() <= files(loop).keys()


def test_a_client_recovers_from_a_full_disk_and_a_damaged_round(loop, monkeypatch):
    server_state, _ = loop.round(server.initial_state(loop.server), 0)
    pending, files_before = server.open_round(loop.server, server_state, 1), files(loop)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        assert "No space left" in refusal(respond, loop.clients[0], pending.requests[0])
    assert files(loop) == files_before
    expected = respond(loop.clients[0], pending.requests[0])
    # A damaged round that has not counted is trained again.
    (loop.clients[0].disk.folder / "visit-000000001").write_bytes(b"")
    assert respond(loop.clients[0], pending.requests[0]) == expected


def test_a_damaged_round_file_is_refused_by_name(loop):
    server_state, _ = loop.round(server.initial_state(loop.server), 0)
    path = loop.clients[0].disk.folder / "visit-000000000"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    pending = server.open_round(loop.server, server_state, 1)
    assert "visit-000000000 is damaged" in refusal(respond, loop.clients[0], pending.requests[0])
    header = b'{"answer_bytes": -1, "request": "", "round": 0, "start": 0}\n'
    path.write_bytes(hashlib.sha256(header).hexdigest().encode() + b"\n" + header)
    assert "visit-000000000.request must be" in refusal(
        respond, loop.clients[0], pending.requests[0]
    )
    path.unlink()
    assert "does not hold round 0" in refusal(respond, loop.clients[0], pending.requests[0])


def test_a_server_that_resumes_from_an_older_round_is_bit_identical(loop, tmp_path):
    """Its newest checkpoint is damaged; clients still have the state of the round before."""
    states = [server.initial_state(loop.server)]
    for t in range(3):
        states.append(loop.round(states[-1], t)[0])
    client_states = {i: loop.client_state(states[2], i) for i in loop.clients}
    store = checkpoints.open_store(tmp_path / "checkpoints")
    saved = {"state": states[1].state, "settled": states[1].settled}
    store.save(1, saved, {})
    template = {**saved, "state": loop.server.programs.shapes[0].state}
    back = server.ServerState(**store.restore(1, template))
    restarted = loop._replace(server=loop.server._replace(start=1))
    again, _ = restarted.round(back, 1)
    chex.assert_trees_all_equal(jax.device_get(again.state), jax.device_get(states[2].state))
    for i in loop.clients:
        chex.assert_trees_all_equal(restarted.client_state(again, i), client_states[i])
    # The earlier start of the server still runs and sends the same requests.
    responses = restarted.ask(server.open_round(restarted.server, again, 2).requests)
    assert loop.ask(server.open_round(loop.server, again, 2).requests) == responses
    late = server.open_round(loop.server, again, 3)
    assert "earlier start" in refusal(respond, loop.clients[0], late.requests[0])


def test_client_side_state_and_examples_are_in_no_message(tmp_path):
    """Each client has a planted number in its private head and in its examples."""
    marks = [np.float32(1234.5678 + i) for i in range(4)]
    x = np.array(DATA.x)
    for i in range(4):
        x[np.asarray(DATA.train.rows[i])[0], 0] = marks[i]
    loop = loopback(METHOD, DATA._replace(x=x), 4, tmp_path)
    server_state, _ = loop.round(server.initial_state(loop.server), 0)
    for i in range(4):  # as if local training had found such numbers
        disk = loop.clients[i].disk
        visited = disk.read(0)
        state = storage.decode_state(visited.state, loop.clients[i].programs.shapes.client)
        state = jax.tree.map(lambda leaf, m=marks[i]: np.full_like(leaf, m), state)
        disk.write(visited._replace(state=storage.encode_state(state)), 0)
        stored = b"".join(path.read_bytes() for path in disk.folder.iterdir())
        assert marks[i].tobytes() in stored
    pending = server.open_evaluation(loop.server, server_state, 1, range(4))
    loop.ask(pending.requests)
    loop.round(server_state, 1)
    assert len(loop.messages) == 4 * 2 * 3
    for content in loop.messages:
        for mark in marks:
            assert mark.tobytes() not in content
            assert str(mark).encode() not in content
