"""A node: it describes its examples, joins runs, and answers as one client.

Its own file decides which examples it has; a request decides only how to train on them. The node's
folder says which client it is and which runs it has enrolled in. It refuses every other request.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.deploy import assembly, client, examples, own_state, schema, wire
from fedjax_pfl.deploy.client import Client
from fedjax_pfl.deploy.lines import to_stderr
from fedjax_pfl.deploy.node_file import OF_DATA, NodeFile, tuples
from fedjax_pfl.deploy.own_state import Disk
from fedjax_pfl.deploy.programs import AtClient
from fedjax_pfl.deploy.schema import ENROL, InvalidError
from fedjax_pfl.runs import export
from fedjax_pfl.settings import configuration

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MODEL = "model.safetensors"
CLASSES = "classes.json"  # names of the model's outputs, where the node's file states them
CLIENT = "client.json"  # which client the node is, if its own file does not say
ENROLLED = "enrolled.json"  # in a run's folder: what the node has said of its examples, as a digest
MOST_BYTES = 4_000_000_000  # of a request, and of what a round holds beside the examples
MOST_RUNS = 1000  # that a node keeps


class Node(NamedTuple):
    """A folder that a machine keeps, and what its owner has decided."""

    folder: Path
    file: NodeFile


def answer(node: Node, content: bytes) -> bytes:
    """Returns the answer to a request; if it is refused, an answer that says why."""
    try:
        request = wire.decode(content, MOST_BYTES, schema.REQUEST)
        with _locked(node.folder):
            _check_client(node, request.facts["client"])
            settings, words = _settings(node, request.facts["settings"])
            if request.facts["kind"] == ENROL:
                return _enrol(node, request)
            return client.answer(_client(node, request, settings, words), request)
    except InvalidError as error:
        return refusal(str(error))
    except OSError as error:
        to_stderr(f"{type(error).__name__}: {error}")
        return refusal(
            f"its disk cannot be written or read ({error.strerror}); its own log says more"
        )
    except Exception as error:  # whose text may quote the node's own files, and stays here
        to_stderr(f"{type(error).__name__}: {error}")
        return refusal(f"it failed with {type(error).__name__}; its own log says more")


def refusal(why: str) -> bytes:
    """Returns an answer that says why there is no other."""
    return wire.encode({"kind": "refused", "why": why[:1000]})


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a folder for one request; a second process waits for the first."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _check_client(node: Node, i: int) -> None:
    """Refuses a request for another client than the one that this node is."""
    known = own_state.describe(node.folder / CLIENT, schema.CLIENT_FILE)
    mine = node.file.client if node.file.client is not None else known.get("client", i)
    if i != mine:
        raise InvalidError(f"it is for client {i}, and this node is client {mine}")


def _settings(node: Node, given: Mapping[str, Any]) -> tuple[ConfigDict, configuration.Registry]:
    """Returns the settings of training; refuses those that the node decides itself."""
    if of_data := sorted(set(given) & OF_DATA):
        raise InvalidError(
            f"it names {', '.join(of_data)}; a node's own file decides all that concerns its data"
        )
    for kind, name in assembly.brought(given).items():
        if name not in node.file.code:
            raise InvalidError(
                f"its {kind} is {name[:100]}, which is not the library's; a node runs it where its "
                "own file has that among its code"
            )
    return assembly.complete(tuples(given))


def _enrol(node: Node, request: wire.Message) -> bytes:
    """Describes the node's examples: in the same way each time in a run."""
    run, i, settings = (request.facts[word] for word in ("run", "client", "settings"))
    own = examples.read(node.file)
    folder = client.folder(node.folder, run)
    mine = {"client": i, "settings": _digest(settings), "examples": own.digest()}
    if not _is_enrolled(folder, mine):
        if len(list(node.folder.glob("run-*"))) >= MOST_RUNS:
            raise InvalidError(f"it has been in {MOST_RUNS} runs; its owner may remove old ones")
        if node.file.client is None:
            own_state.whole(node.folder / CLIENT, json.dumps({"client": i}).encode() + b"\n")
        folder.mkdir(exist_ok=True)
        own_state.whole(folder / ENROLLED, json.dumps(mine).encode() + b"\n")
    facts = {"kind": ENROL, "run": run, "client": i, "request": request.digest}
    return wire.encode({**facts, "described": own.facts})


def _is_enrolled(folder: Path, mine: Mapping[str, Any]) -> bool:
    """Returns True if the node has enrolled in a run; refuses if something has changed since."""
    known = own_state.describe(folder / ENROLLED, schema.ENROLLED)
    if not known:
        return False
    if known["client"] != mine["client"]:
        raise InvalidError(f"it is client {known['client']} of this run")
    if known["settings"] != mine["settings"]:  # with which it might upload what is its own
        raise InvalidError("its settings are not those that this node enrolled with")
    if known["examples"] != mine["examples"]:
        raise InvalidError(
            "its examples are not those that it enrolled with; its owner can remove the folder of "
            "this run, and the node enrols again in a new run"
        )
    if "federation" in mine and known.get("federation", mine["federation"]) != mine["federation"]:
        raise InvalidError("the federation that it describes is not that of this run")
    return True


def _check_enrolled(folder: Path, mine: Mapping[str, Any]) -> None:
    """Refuses a request of a run that the node has not enrolled in, or that has changed."""
    if not _is_enrolled(folder, mine):
        raise InvalidError("this node has not enrolled in this run")


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class _Joined(NamedTuple):
    """A node's programs in one run, and what it has enrolled with, as digests."""

    client: Client
    enrolled: dict[str, Any]


# By what they were made of: a process that answers several requests compiles once.
_made: dict[str, _Joined] = {}
_MOST = 16


def _client(
    node: Node, request: wire.Message, settings: ConfigDict, words: configuration.Registry
) -> Client:
    parts = [request.facts[word] for word in ("settings", "federation", "run", "client")]
    given, description, run, i = parts
    name = json.dumps([repr(node), *parts], sort_keys=True)
    folder = client.folder(node.folder, run)
    if name in _made:
        _check_enrolled(folder, _made[name].enrolled)
        return _made[name].client
    mine = examples.read(node.file)
    enrolled = {"client": i, "settings": _digest(given), "examples": mine.digest()}
    enrolled["federation"] = _digest(description)
    _check_enrolled(folder, enrolled)
    data = examples.fitted(mine, description, i)
    _, method = assembly.built(settings, words, description, data)
    disk = Disk(folder / f"client-{i}")
    group = method.group(i)

    def keep(variables: PyTree, t: int) -> None:
        result = export.RunFacts(
            algorithm=settings.algorithm,
            dataset=str(node.file.data["dataset"]),
            seed=settings.seed,
            federation=method.federation,
        )
        member = method.member(group)
        content = export.pack(
            result,
            member,
            client=i,
            rounds=t,
            data=client_data(data, np.asarray(0)),
            variables=variables,
        )
        own_state.whole(folder / MODEL, content)
        if names := description["alike"].get("classes"):
            own_state.whole(folder / CLASSES, json.dumps(names).encode() + b"\n")

    programs = AtClient(method, group, data)
    parts_of_round = (programs.shapes.client, programs.shapes.payload, programs.shapes.answer)
    if sum(map(trees.leaf_bytes, jax.tree.leaves(parts_of_round))) > MOST_BYTES:
        raise InvalidError(f"its model needs more than {MOST_BYTES:,} bytes in a round")
    if own_state.describe(folder / ENROLLED, schema.ENROLLED) != enrolled:
        own_state.whole(folder / ENROLLED, json.dumps(enrolled).encode() + b"\n")
    while len(_made) >= _MOST:
        del _made[next(iter(_made))]
    _made[name] = _Joined(Client(run, i, programs, data, disk, keep), enrolled)
    return _made[name].client
