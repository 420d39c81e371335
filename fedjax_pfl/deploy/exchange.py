"""Connection between the server of a run and its nodes, and limits on waiting for them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol


class Exchange(Protocol):
    """Connection between the server and the clients."""

    def ask(
        self, requests: Mapping[int, bytes], seconds: float | None
    ) -> Iterator[tuple[int, bytes]]:
        """Sends requests and yields pairs of client id and response as they arrive.

        Stops when all clients have responded or after `seconds` (None: waits without a limit).
        """

    def wait_for_return(self, clients: Iterable[int], seconds: float) -> None:
        """Waits up to `seconds` until one of the `clients` that are offline now is online.

        Returns at once if all are online.
        """


class Waiting(NamedTuple):
    """Limits on waiting for clients."""

    seconds: float = 600.0  # time for the responses of a round, and for offline nodes to return
    min_answers: int = 1  # accepted responses that a round needs; with fewer it is repeated
    tries: int = 10  # repetitions of one round after which the run stops
