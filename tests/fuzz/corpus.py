"""Inputs kept as files: seeds that are files by nature, and what was once found, so that it stays
repaired.

`corpus/TARGET/NAME` is one input, byte by byte. `python -m tests.fuzz --keep` writes what it finds
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")


def kept(target: str) -> Sequence[bytes]:
    """The inputs of a target that are in files, in the order of their names."""
    return tuple(path.read_bytes() for path in sorted((FOLDER / target).glob("*")))


def keep(target: str, data: bytes) -> Path:
    """Writes an input to a file of its own; returns where."""
    path = FOLDER / target / f"found-{sha256(data).hexdigest()[:12]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
