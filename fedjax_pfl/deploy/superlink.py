"""Starts a Flower SuperLink that takes commands from its own machine only.

python -m fedjax_pfl.deploy.superlink [arguments of flower-superlink]

Flower serves nodes and commands on one port, and asks only nodes for a key. Whoever may send
commands can start programs on the server, and these can train on all nodes.
"""

import ipaddress
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import flower_version
from fedjax_pfl.deploy.lines import run_command

_FOR_NODES = "/v1/fleet/"  # paths of the requests that Flower checks the keys of nodes for
_ADDED = ("--enable-supernode-auth", "--disable-runtime-dependency-installation")
_REFUSED = ("--allow-runtime-dependency-installation", "--insecure")
# Variables with which other ports take commands, or anyone can claim to be on this machine.
_OPENING = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API", "FORWARDED_ALLOW_IPS")

App = Callable[[Any, Any, Any], Awaitable[None]]  # an ASGI application


def is_local(host: str) -> bool:
    """Returns True for an address from which only processes of this machine connect."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def with_local_commands(app: App) -> App:
    """Returns the ASGI application, which from other machines takes requests of nodes only."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        is_request = scope["type"] == "http"
        is_for_nodes = is_request and scope["path"].startswith(_FOR_NODES)
        if scope["type"] == "lifespan" or is_for_nodes or is_local((scope.get("client") or "?")[0]):
            return await app(scope, receive, send)
        if not is_request:
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"commands come from the server only\n"})

    return guarded


def main(arguments: Sequence[str]) -> None:
    """Runs a SuperLink until it is stopped, with node keys.

    The arguments are those of flower-superlink. Raises UsageError for those that would admit nodes
    without keys or TLS, or let a run install packages.
    """
    for word in arguments:
        flag = word.partition("=")[0]
        # Flower accepts shortened flags.
        if len(flag) > 2 and any(name.startswith(flag) for name in _REFUSED):
            raise UsageError(f"{word} would leave the server open; leave it out")
    flower_version.check()
    import flwr.superlink.main
    from flwr.superlink.cli import flower_superlink

    create_app = flwr.superlink.main.create_app

    def create_guarded_app(*options: Any, **named_options: Any) -> Any:
        app = create_app(*options, **named_options)
        app.add_middleware(with_local_commands)
        return app

    flwr.superlink.main.create_app = create_guarded_app
    for name in _OPENING:
        os.environ.pop(name, None)
    sys.argv = ["flower-superlink", *arguments, *(a for a in _ADDED if a not in arguments)]
    flower_superlink()


if __name__ == "__main__":
    run_command(main)
