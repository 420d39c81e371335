"""A server and its clients in one process, which exchange encoded messages."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.deploy import client, schema, server, wire
from fedjax_pfl.deploy.client import RunClient
from fedjax_pfl.deploy.programs import ClientPrograms, Method, ServerPrograms, single_client
from fedjax_pfl.deploy.server import PendingRequests, Server, ServerState
from fedjax_pfl.deploy.storage import ClientDisk
from fedjax_pfl.simulation.records import Evaluation, Log

RUN = "1f0a"


class Loopback(NamedTuple):
    """Server and clients, and all messages that they exchanged."""

    server: Server
    clients: dict[int, RunClient]
    messages: list[bytes]

    def ask(self, requests: Mapping[int, bytes]) -> dict[int, bytes]:
        responses = {i: respond(self.clients[i], content) for i, content in requests.items()}
        self.messages.extend([*requests.values(), *responses.values()])
        return responses

    def first_round(self) -> tuple[ServerState, PendingRequests, dict[int, bytes]]:
        """Returns the initial state, the requests of round 0 and the responses."""
        server_state = server.initial_state(self.server)
        pending = server.open_round(self.server, server_state, 0)
        return server_state, pending, self.ask(pending.requests)

    def round(
        self, server_state: ServerState, t: int, absent: Callable[[int], bool] = lambda i: False
    ) -> tuple[ServerState, tuple[Log, ...]]:
        pending = server.open_round(self.server, server_state, t)
        received = {
            i: server.read_update(self.server, pending, i, content)
            for i, content in self.ask(pending.requests).items()
            if not absent(i)
        }
        return server.close_round(self.server, server_state, pending, received)

    def evaluate(self, server_state: ServerState, t: int, *, last: bool = False) -> Evaluation:
        pending = server.open_evaluation(self.server, server_state, t, self.clients, last=last)
        received = {
            i: server.read_scores(self.server, pending, i, content)
            for i, content in self.ask(pending.requests).items()
        }
        return server.stack_scores(self.server, received)

    def client_state(self, server_state: ServerState, i: int) -> Any:
        return client._counted_state(self.clients[i], int(server_state.settled[i]))


def respond(client_: RunClient, content: bytes) -> bytes:
    """Decodes a request and returns the client's response."""
    return client.respond(client_, wire.decode(content, len(content), schema.REQUEST))


def describe_data(data: Any, n: int) -> dict[str, Any]:
    """Returns the description of a federation of `n` clients."""
    splits = ("train", "validation", "test")
    sizes = {name: np.asarray(getattr(data, name).size) for name in splits}
    shape = list(np.shape(data.x)[1:])
    shared = {"input_shape": shape, "input_dtype": "float32", "each": [], "outputs": 1}
    return {
        "counts": [{name: int(size[i]) for name, size in sizes.items()} for i in range(n)],
        "held_out": 0,
        "groups": 1,
        "alike": {**shared, "target": ["int32", []], "constants": {}},
        "widths": {name: 1 for name in splits},
        "stored_dtype": "float32",
    }


def loopback(method: Method, data: Any, cohort: int, folder: Path) -> Loopback:
    n = method.federation.clients
    datasets = [single_client(data, i) for i in range(n)]
    client_programs = ClientPrograms(method, 0, datasets[0])
    clients = {
        i: RunClient(RUN, i, client_programs, datasets[i], ClientDisk(folder / f"client-{i}"))
        for i in range(n)
    }
    request_facts = {"settings": {}, "federation": describe_data(data, n)}
    programs = ServerPrograms(method, datasets[0], cohort)
    return Loopback(Server(RUN, 0, programs, request_facts), clients, [])
