"""Checks that a checkpoint is complete before vLLM loads it: a failed load breaks the instance."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import Serial

INDEX = "model.safetensors.index.json"
_LARGEST_INDEX = 2**28  # bytes
_LARGEST_HEAD = 10**8  # bytes, the format's own limit
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth")  # only their presence is checked


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    data_offsets: Annotated[list[Serial], msgspec.Meta(min_length=2, max_length=2)]


def check_checkpoint(folder: Path) -> None:
    """Raises CallerError if `folder` has no weights that vLLM can load, or truncated files.

    Reads the header of each safetensors file: the data that it declares must be in it. This takes
    time, and blocks forever on a mount that does not answer, so do not call it on an event loop.
    """
    if not folder.is_dir():
        raise CallerError(f"weights {folder}: no such folder; a model folder is needed")
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.exists():
        files = sorted({folder / _within(index, n) for n in _read_index(index).weight_map.values()})
    for file in files:
        _check_safetensors(file)
    if not files and not any(path for kind in _OTHER_WEIGHTS for path in folder.glob(kind)):
        raise CallerError(f"weights {folder}: has no weights (*.safetensors, *.bin, *.pt)")


def _read_index(path: Path) -> _Index:
    size = _size_of_file(path)
    if size > _LARGEST_INDEX:
        raise CallerError(f"weights {path}: {size} bytes are too many for an index")
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, ValueError, RecursionError) as error:
        raise CallerError(f"weights {path}: {error}") from error


def _within(index: Path, name: str) -> str:
    """A file's name, which must lie in the same folder."""
    if name != Path(name).name:
        raise CallerError(f"weights {index}: {name!r} is not a file of this folder")
    return name


def _check_safetensors(file: Path) -> None:
    """The format: length of the header (8 bytes, little endian), the header as JSON, the data."""
    size = _size_of_file(file)
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, _LARGEST_HEAD):
                raise CallerError(f"weights {file}: not a safetensors file, or truncated")
            head: dict[str, Any] = msgspec.json.decode(stream.read(length), type=dict[str, Any])
        head.pop("__metadata__", None)
        tensors = msgspec.convert(head, dict[str, _Tensor])
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        if isinstance(error, CallerError):
            raise
        raise CallerError(f"weights {file}: {error}") from error
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if not tensors or 8 + length + end != size:
        raise CallerError(
            f"weights {file}: has {size} bytes, but its header declares {8 + length + end}; "
            "was it written completely?"
        )


def _size_of_file(path: Path) -> int:
    """In bytes. Only regular files are opened: reading a pipe would wait for a writer."""
    try:
        told = path.stat()
    except (OSError, ValueError) as error:
        raise CallerError(f"weights {path}: {error}") from error
    if not stat.S_ISREG(told.st_mode):
        raise CallerError(f"weights {path}: is not a file")
    return told.st_size
