"""A node: the process that describes its examples, enrols in runs and trains as one client.

The node's file decides which examples it has; a request only decides how to train on them. The
node's folder records which client it is and the runs where it is enrolled. All other requests
are refused.
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
from fedjax_pfl.deploy import assembly, client, examples, schema, storage, wire
from fedjax_pfl.deploy.client import RunClient
from fedjax_pfl.deploy.lines import to_stderr
from fedjax_pfl.deploy.node_file import DATA_SETTINGS, SHARED_SETTINGS, NodeFile, to_tuples
from fedjax_pfl.deploy.programs import ClientPrograms
from fedjax_pfl.deploy.schema import ENROL, InvalidError
from fedjax_pfl.deploy.storage import ClientDisk
from fedjax_pfl.runs import export
from fedjax_pfl.settings import configuration

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MODEL = "model.safetensors"
CLASSES = "classes.json"  # names of the model's outputs, if the node's file has them
CLIENT = "client.json"  # client id of the node, if the node's file has none
ENROLLED = "enrolled.json"  # digests of settings and examples, in the folder of a run
MAX_BYTES = 4_000_000_000  # size of a request, and of a round's arrays without the examples
MAX_RUNS = 1000


class Node(NamedTuple):
    """A node's folder, which outlives its process, and the content of its file."""

    folder: Path  # its state: an enrolment and stored rounds for each run
    file: NodeFile  # content of its JSON file


def respond(node: Node, content: bytes) -> bytes:
    """Returns the response to an encoded request; a refusal with a reason if it is refused."""
    try:
        request = wire.decode(content, MAX_BYTES, schema.REQUEST)
        with _locked(node.folder):
            _check_client(node, request.facts["client"])
            settings, registry = _settings(node, request.facts["settings"])
            if request.facts["kind"] == ENROL:
                return _enrol(node, request)
            return client.respond(_client(node, request, settings, registry), request)
    except InvalidError as error:
        return refusal(str(error))
    except Exception as error:  # Its text may quote the node's files and must not be sent.
        to_stderr(f"{type(error).__name__}: {error}")
        reason = f"it failed with {type(error).__name__}"
        if isinstance(error, OSError):
            reason = f"its disk cannot be written or read ({error.strerror})"
        return refusal(f"{reason}; its own log says more")


def refusal(why: str) -> bytes:
    """Returns the response that refuses a request, with the reason."""
    return wire.encode({"kind": "refused", "why": why[:1000]})


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder during a request; other processes wait."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_client(node: Node, i: int) -> None:
    """Raises InvalidError if this node is not client `i`."""
    stored = storage.read_json(node.folder / CLIENT, schema.CLIENT_FILE)
    own_id = node.file.client if node.file.client is not None else stored.get("client", i)
    if i != own_id:
        raise InvalidError(f"it is for client {i}, and this node is client {own_id}")


def _settings(
    node: Node, requested: Mapping[str, Any]
) -> tuple[ConfigDict, configuration.Registry]:
    """Completes the settings of a request; returns them with the registry of their components.

    Raises InvalidError if they name data or code that the node's file does not allow, or differ
    from it in a setting of the whole federation.
    """
    if data_names := sorted(set(requested) & DATA_SETTINGS):
        raise InvalidError(
            f"it sets {', '.join(data_names)}; only the node's own file decides about its data"
        )
    for kind, name in assembly.user_code(requested).items():
        if name not in node.file.code:
            raise InvalidError(
                f"its {kind} is {name[:100]}, which is not built in; a node runs it only if its "
                "own file lists it under code"
            )
    settings, registry = assembly.complete(to_tuples(requested))
    if "clients" in node.file.data:
        own_settings = configuration.complete(node.file.data)
        for name in SHARED_SETTINGS:
            if settings[name] != own_settings[name]:
                raise InvalidError(
                    f"its {name} is not that of this node's file, which partitions the examples; "
                    "use the same number in both"
                )
    return settings, registry


def _enrol(node: Node, request: wire.Message) -> bytes:
    """Enrols the node in a run; returns the encoded response, which describes its examples.

    Raises InvalidError if the node has enrolled in it otherwise, or in too many runs.
    """
    run, i, settings = (request.facts[name] for name in ("run", "client", "settings"))
    node_examples = examples.read(node.file)
    folder = node.folder / f"run-{run}"
    enrolment = {"client": i, "settings": _digest(settings), "examples": node_examples.digest()}
    if not _is_enrolled(folder, enrolment):
        if len(list(node.folder.glob("run-*"))) >= MAX_RUNS:
            raise InvalidError(f"it has been in {MAX_RUNS} runs; its owner may remove old ones")
        if node.file.client is None:
            storage.write_json(node.folder / CLIENT, {"client": i})
        folder.mkdir(exist_ok=True)
        storage.write_json(folder / ENROLLED, enrolment)
    return wire.encode({**wire.response_facts(request), "described": node_examples.facts})


def _is_enrolled(folder: Path, enrolment: Mapping[str, Any]) -> bool:
    """Returns True if the node has enrolled in the run with this folder.

    `enrolment` has the id `client` and digests of `settings`, `examples` and perhaps `federation`.
    Raises InvalidError if the node has enrolled in the run with another id or other digests.
    """
    stored = storage.read_json(folder / ENROLLED, schema.ENROLLED)
    if not stored:
        return False
    if stored["client"] != enrolment["client"]:
        raise InvalidError(f"it is client {stored['client']} of this run")
    # Other settings could upload parameters that the enrolled method keeps on the client.
    if stored["settings"] != enrolment["settings"]:
        raise InvalidError("its settings are not those that this node enrolled with")
    if stored["examples"] != enrolment["examples"]:
        raise InvalidError(
            "its examples are not those that it enrolled with; its owner can remove the folder of "
            "this run to enrol in a new run"
        )
    federation = enrolment.get("federation")
    if federation is not None and stored.get("federation", federation) != federation:
        raise InvalidError("the federation that it describes is not that of this run")
    return True


def _check_enrolled(folder: Path, enrolment: Mapping[str, Any]) -> None:
    """Raises InvalidError unless the node has enrolled in the run with the same `enrolment`."""
    if not _is_enrolled(folder, enrolment):
        raise InvalidError("this node has not enrolled in this run")


def _digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 digest of JSON data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# Clients and the digests with which they enrolled, by node, settings, federation, run and id. A
# process compiles once for many requests.
_client_cache: dict[str, tuple[RunClient, dict[str, Any]]] = {}
_MAX_CACHED = 16


def _client(
    node: Node, request: wire.Message, settings: ConfigDict, registry: configuration.Registry
) -> RunClient:
    """Builds the client that a training or evaluation request is for, or returns a cached one.

    `settings` are the completed settings of the request, and `registry` has their components.
    Raises InvalidError if the model is too large to send.
    """
    parts = [request.facts[name] for name in ("settings", "federation", "run", "client")]
    requested, description, run, i = parts
    cache_key = json.dumps([repr(node), *parts], sort_keys=True)
    folder = node.folder / f"run-{run}"
    if cache_key in _client_cache:
        cached_client, enrolment = _client_cache[cache_key]
        _check_enrolled(folder, enrolment)
        return cached_client
    node_examples = examples.read(node.file)
    enrolment = {"client": i, "settings": _digest(requested), "examples": node_examples.digest()}
    enrolment["federation"] = _digest(description)
    _check_enrolled(folder, enrolment)
    data = examples.normalise(node_examples, description, i)
    _, method = assembly.build_method(settings, registry, description, data)
    group = method.group(i)
    metadata = {**node_examples.metadata, **(method.federation.metadata or {})}
    federation = method.federation._replace(metadata=metadata)

    def save_model(variables: PyTree, t: int) -> None:
        """Writes the client's model after `t` rounds, and the names of its classes."""
        result = export.RunFacts(
            algorithm=settings.algorithm,
            dataset=str(node.file.data["dataset"]),
            seed=settings.seed,
            federation=federation,
        )
        content = export.pack(
            result,
            method.group_algorithm(group),
            client=i,
            rounds=t,
            data=client_data(data, np.asarray(0)),
            variables=variables,
        )
        storage.write_atomic(folder / MODEL, content)
        if names := description["alike"].get("classes"):
            storage.write_json(folder / CLASSES, names)

    programs = ClientPrograms(method, group, data)
    round_shapes = (programs.shapes.client, programs.shapes.payload, programs.shapes.result)
    if sum(map(trees.leaf_bytes, jax.tree.leaves(round_shapes))) > MAX_BYTES:
        raise InvalidError(f"its model needs more than {MAX_BYTES:,} bytes in a round")
    if storage.read_json(folder / ENROLLED, schema.ENROLLED) != enrolment:
        storage.write_json(folder / ENROLLED, enrolment)
    while len(_client_cache) >= _MAX_CACHED:
        del _client_cache[next(iter(_client_cache))]
    new_client = RunClient(
        run=run,
        i=i,
        programs=programs,
        data=data,
        disk=ClientDisk(folder / f"client-{i}"),
        save_model=save_model,
    )
    _client_cache[cache_key] = new_client, enrolment
    return new_client
