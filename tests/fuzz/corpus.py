"""Inputs kept as files: seeds in file formats, and inputs that once failed, as regression tests.

`corpus/TARGET/NAME` is one input, byte by byte. `python -m tests.fuzz --keep` writes failing inputs
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")


def kept(target: str) -> Sequence[bytes]:
    """The inputs of a target in files, in the order of their names."""
    return tuple(path.read_bytes() for path in sorted((FOLDER / target).glob("*")))


def keep(target: str, data: bytes) -> Path:
    """Write an input to its own file; returns the path."""
    path = FOLDER / target / f"found-{sha256(data).hexdigest()[:12]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
