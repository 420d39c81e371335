"""Bytes that really pass between nodes and a SuperLink, with all that Flower and TLS add.

python -m tests.stress.relay 19000 8000   # nodes connect to the first port, the second is Flower's

It hands every byte on, and prints a line of JSON each second in which some have passed: the time,
and the bytes down to nodes and up from them so far.
"""

import asyncio
import contextlib
import json
import sys
import time


class Counted:
    """Bytes so far."""

    def __init__(self) -> None:
        self.down = self.up = 0


async def hand_on(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, counted: Counted, way: str
) -> None:
    """One direction of a connection, until it ends."""
    with contextlib.suppress(ConnectionError):
        while part := await source.read(1 << 16):
            setattr(counted, way, getattr(counted, way) + len(part))
            target.write(part)
            await target.drain()
    target.close()


async def relay(listen: int, port: int, counted: Counted) -> asyncio.Server:
    """Listen on loopback, and connect to another port of it for each that comes."""

    async def connected(node: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        link, there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            hand_on(node, there, counted, "up"), hand_on(link, back, counted, "down")
        )

    return await asyncio.start_server(connected, "127.0.0.1", listen)


async def main(listen: int, port: int) -> None:
    """Count until the process is ended."""
    counted, before = Counted(), (0, 0)
    await relay(listen, port, counted)
    while True:
        await asyncio.sleep(1)
        now = counted.down, counted.up
        if now != before:
            print(json.dumps({"time": time.time(), "down": now[0], "up": now[1]}), flush=True)
        before = now


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
