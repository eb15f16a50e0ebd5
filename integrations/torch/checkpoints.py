"""Writes weights as a folder of safetensors files, which vLLM loads with `reload_weights`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

#: The size at which a file is closed: one file's tensors are held in memory beside the model.
SHARD_BYTES = 4 * 2**30


class Checkpoints:
    """A folder for each version in `root`, written by one process.

    `root` is a path that every instance can read. All but the newest `keep` folders are deleted; an
    instance that has just joined may still load the previous version.
    """

    def __init__(self, root: str | Path, *, keep: int = 2, shard_bytes: int = SHARD_BYTES) -> None:
        self._root = Path(root).absolute()
        self._keep = keep
        self._shard_bytes = shard_bytes

    def write(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Write a folder with these tensors, under the names of the model's own checkpoint. The
        folder gets its final name only when it is complete. Raises OSError."""
        folder = self._folder(version)
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for number, shard in enumerate(self._shards(tensors)):
            save_file(shard, unfinished / f"model-{number:05d}.safetensors", {"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        return folder

    def delete_before(self, version: int) -> None:
        """Delete folders that are no longer needed once all instances have `version` or newer."""
        there = sorted(int(path.name) for path in self._root.iterdir() if path.name.isdecimal())
        for old in there[: -self._keep]:
            if old < version:
                shutil.rmtree(self._folder(old), ignore_errors=True)

    def _folder(self, version: int) -> Path:
        return self._root / str(version)

    def _shards(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[dict[str, torch.Tensor]]:
        shard: dict[str, torch.Tensor] = {}
        held = 0
        for name, tensor in tensors:
            shard[name] = tensor.detach().cpu().contiguous()
            held += tensor.nbytes
            if held >= self._shard_bytes:
                yield shard
                shard, held = {}, 0
        if shard:
            yield shard
