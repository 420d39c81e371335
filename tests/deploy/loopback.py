"""A server and its clients in one process, with nothing but bytes between them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core.randomness import DROP, stage_key
from fedjax_pfl.deploy import client, schema, server, wire
from fedjax_pfl.deploy.client import Client
from fedjax_pfl.deploy.programs import ClientPrograms, Method, ServerPrograms, single_client
from fedjax_pfl.deploy.server import Server, ServerState
from fedjax_pfl.deploy.storage import ClientDisk
from fedjax_pfl.simulation.records import Evaluation, Log

RUN = "1f0a"


class Loopback(NamedTuple):
    """Both sides, and every message that went between them."""

    server: Server
    clients: dict[int, Client]
    messages: list[bytes]

    def ask(self, requests: Mapping[int, bytes]) -> dict[int, bytes]:
        answers = {i: answer(self.clients[i], content) for i, content in requests.items()}
        self.messages.extend([*requests.values(), *answers.values()])
        return answers

    def round(
        self, server_state: ServerState, t: int, absent: Callable[[int], bool] = lambda i: False
    ) -> tuple[ServerState, tuple[Log, ...]]:
        opened = server.open_round(self.server, server_state, t)
        came = {
            i: server.read_update(self.server, opened, i, content)
            for i, content in self.ask(opened.requests).items()
            if not absent(i)
        }
        return server.close_round(self.server, server_state, opened, came)

    def evaluate(self, server_state: ServerState, t: int, *, last: bool = False) -> Evaluation:
        opened = server.open_evaluation(self.server, server_state, t, self.clients, last=last)
        came = {
            i: server.read_scores(self.server, opened, i, content)
            for i, content in self.ask(opened.requests).items()
        }
        return server.stack_scores(self.server, came)

    def client_state(self, server_state: ServerState, i: int) -> Any:
        return client._counted_state(self.clients[i], int(server_state.settled[i]))


def answer(one: Client, content: bytes) -> bytes:
    """As a node gives it."""
    return client.respond(one, wire.decode(content, len(content), schema.REQUEST))


def described(data: Any, n: int) -> dict[str, Any]:
    """The parts of a federation's description that its clients' examples say."""
    splits = ("train", "validation", "test")
    sizes = {name: np.asarray(getattr(data, name).size) for name in splits}
    shape = list(np.shape(data.x)[1:])
    alike = {"input_shape": shape, "input_dtype": "float32", "each": [], "outputs": 1}
    return {
        "counts": [{name: int(size[i]) for name, size in sizes.items()} for i in range(n)],
        "held_out": 0,
        "groups": 1,
        "alike": {**alike, "target": ["int32", []], "constants": {}},
        "widths": {name: 1 for name in splits},
        "stored_dtype": "float32",
    }


def loopback(method: Method, data: Any, cohort: int, folder: Path, start: int = 0) -> Loopback:
    n = method.federation.clients
    own = [single_client(data, i) for i in range(n)]
    programs = ClientPrograms(method, 0, own[0])
    clients = {
        i: Client(RUN, i, programs, own[i], ClientDisk(folder / f"client-{i}")) for i in range(n)
    }
    more = {"settings": {}, "federation": described(data, n)}
    return Loopback(Server(RUN, start, ServerPrograms(method, own[0], cohort), more), clients, [])


def dropped(seed: int, dropout: float, t: int) -> Callable[[int], bool]:
    """Whom the simulation drops in a round."""

    def one(i: int) -> bool:
        key = stage_key(jax.random.key(seed), DROP, t, jnp.int32(i))
        return bool(jax.random.uniform(key) < dropout)

    return one


def stacked(each: Any) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


__all__ = ["RUN", "Loopback", "answer", "dropped", "loopback", "stacked"]
