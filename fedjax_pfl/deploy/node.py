"""A node: it says what it has, joins a federation, and answers as its client.

All that it keeps lies in one folder of its own, by run. Which data it uses it decides itself: the
server sends a configuration, and of that the node takes no path, and of what is executed only names
that its own file lists too.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl.config import configuration
from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.deploy import assembly, client, examples, own_state, wire
from fedjax_pfl.deploy.client import ENROL, MOST, Client, Refused
from fedjax_pfl.deploy.own_state import Disk
from fedjax_pfl.deploy.programs import AtClient
from fedjax_pfl.runs import export

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MODEL = "model.safetensors"
CLASSES = "classes.json"  # where clients name their classes: those of all, by output


class Node(NamedTuple):
    """What a machine brings: a folder that it keeps, and where its examples are.

    data: settings of the data, such as {"dataset": "csv:mine.csv"}; None: the node's part of the
      dataset in the server's configuration, for trials in which all nodes can build that.
    code: methods, networks and tasks that are not the library's and that it runs, as MODULE:NAME.
    """

    folder: Path
    data: Mapping[str, Any] | None = None
    code: tuple[str, ...] = ()


def answer(node: Node, content: bytes) -> bytes:
    """The answer to a request of any kind; one that is refused gets an answer that says why."""
    facts: dict[str, Any] = {}
    try:
        request = wire.decode(content, MOST)
        facts = request.facts
        with _alone(node.folder):
            if facts.get("kind") == ENROL:
                return _enrolled(node, request)
            return client.answer(_client(node, request), content)
    except (Refused, wire.WireError) as error:
        return refusal(facts, str(error))
    except Exception as error:  # whose text may hold what is the node's own, and stays here
        line = (str(error).splitlines() or [""])[0]
        print(f"{type(error).__name__}: {line}", file=sys.stderr, flush=True)
        return refusal(facts, f"it failed with {type(error).__name__}; its own log says more")


def refusal(facts: Mapping[str, Any], why: str) -> bytes:
    """An answer that says why there is none."""
    known = {word: facts.get(word) for word in ("kind", "run", "client", "round")}
    return wire.encode({**known, "refused": " ".join(why.split())[:500]})


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One request at a time works in a folder; a second process waits for the first."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _enrolled(node: Node, request: wire.Message) -> bytes:
    """What the node says of its examples."""
    mine = _own(node, request)
    facts = {"kind": ENROL, "run": request.facts["run"], "client": request.facts["client"]}
    return wire.encode({**facts, "request": request.digest, "said": mine.facts})


def _settings(node: Node, request: wire.Message) -> tuple[ConfigDict, configuration.Words]:
    given = request.facts.get("settings")
    if not isinstance(given, dict):
        raise Refused("it holds no settings")
    for kind, said in assembly.brought(given).items():
        if said not in node.code:
            raise Refused(
                f"its {kind} is {said[:100]}, which is not the library's; a node runs it where its "
                "own file has that among its code"
            )
    return assembly.complete(_tuples(given))


def _tuples(plain: Any) -> Any:
    """JSON with tuples for lists, as settings are."""
    if isinstance(plain, dict):
        return {key: _tuples(value) for key, value in plain.items()}
    return tuple(map(_tuples, plain)) if isinstance(plain, list) else plain


def _own(node: Node, request: wire.Message) -> assembly.Own:
    settings, words = _settings(node, request)
    if node.data is not None:
        return examples.own(settings, words, node.data)
    if ":" in settings.dataset:
        raise UsageError(
            f"the server's configuration names the files {settings.dataset}, and a node reads none "
            "but its own: say which in its own configuration"
        )
    i = request.facts.get("client")
    if type(i) is not int or not 0 <= i < settings.clients:
        raise Refused(f"there is no client {i}")
    return examples.shared(settings, words, i)


# Programs, by what they were made of: a process that answers several requests compiles once.
_made: dict[str, Client] = {}
_MOST = 16


def _client(node: Node, request: wire.Message) -> Client:
    facts = request.facts
    parts = [facts.get(word) for word in ("settings", "federation", "run", "client")]
    name = json.dumps([str(node.folder), *parts], sort_keys=True)
    if name in _made:
        return _made[name]
    settings, words = _settings(node, request)
    description, i, run = facts.get("federation"), facts.get("client"), facts.get("run")
    if not isinstance(description, dict) or type(i) is not int or not isinstance(run, str):
        raise Refused("it describes no federation")
    mine = _own(node, request)
    data = examples.fitted(mine, description)
    _, method = assembly.built(settings, words, description, data)
    if not 0 <= i < method.federation.clients:
        raise Refused(f"there is no client {i}")
    folder = client.folder(node.folder, run)
    disk = Disk(folder / f"client-{i}")
    group = method.group(i)

    def keep(variables: PyTree, t: int) -> None:
        result = export.Described(
            algorithm=settings.algorithm,
            dataset=str((node.data or {}).get("dataset", settings.dataset)),
            seed=settings.seed,
            federation=method.federation,
        )
        member = method.member(group)
        content = export.packed(result, member, i, t, client_data(data, np.asarray(0)), variables)
        folder.mkdir(parents=True, exist_ok=True)  # it may not have been in any round
        own_state.whole(folder / MODEL, content)
        if names := description.get("classes"):  # of outputs, which a model has numbers of
            own_state.whole(folder / CLASSES, json.dumps(names).encode() + b"\n")

    programs = AtClient(method, group, data)
    while len(_made) >= _MOST:
        del _made[next(iter(_made))]
    _made[name] = Client(run, i, programs, data, disk, keep)
    return _made[name]
