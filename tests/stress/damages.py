"""What somebody, or a disk, may do to a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DEEP = b"[" * 100_000
TEXTS: dict[str, Callable[[bytes, np.random.Generator], bytes]] = {}


def _text(function: Callable[[bytes, np.random.Generator], bytes]) -> Any:
    TEXTS[function.__name__.replace("_", " ")] = function
    return function


@_text
def bits_flipped(content: bytes, rng: np.random.Generator) -> bytes:
    """A few."""
    changed = bytearray(content)
    for at in rng.integers(0, len(changed) * 8, 3):
        changed[at // 8] ^= 1 << (at % 8)
    return bytes(changed)


@_text
def cut_off(content: bytes, rng: np.random.Generator) -> bytes:
    """Anywhere."""
    return content[: rng.integers(1, len(content))]


@_text
def emptied(content: bytes, rng: np.random.Generator) -> bytes:
    """To nothing."""
    del content, rng
    return b""


@_text
def binary(content: bytes, rng: np.random.Generator) -> bytes:
    """Of any length."""
    return rng.bytes(len(content))


@_text
def a_thousand_levels(content: bytes, rng: np.random.Generator) -> bytes:
    """Of lists in lists."""
    del content, rng
    return DEEP


@_text
def another_type(content: bytes, rng: np.random.Generator) -> bytes:
    """Numbers become words."""
    del rng
    return content.replace(b"0", b'"no"')


@_text
def lines_swapped(content: bytes, rng: np.random.Generator) -> bytes:
    """In any order."""
    return b"\n".join(np.array(content.split(b"\n"), object)[rng.permutation(content.count(b"\n"))])


OTHERS = ("removed", "a folder in its place", "a link to itself", "another file's content")


def damaged(kind: str, path: Path, rng: np.random.Generator) -> None:
    """One fault to a file."""
    if kind in TEXTS:
        path.write_bytes(TEXTS[kind](path.read_bytes(), rng))
        return
    content = b""
    if kind == "another file's content":
        other = "traffic.json" if path.name == "config.json" else "config.json"
        content = (path.parent / other).read_bytes()
    path.unlink()
    if kind == "a folder in its place":
        path.mkdir()
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "another file's content":
        path.write_bytes(content)
