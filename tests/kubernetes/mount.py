"""Folders as kubelet mounts them."""

from __future__ import annotations

import shutil
from pathlib import Path


class Mount:
    """A ConfigMap or Secret as kubelet mounts it: files are links into `..data`, itself a link to a
    folder of this version, which is replaced by a rename; then the former folder is removed."""

    def __init__(self, folder: Path, **files: str) -> None:
        self._folder = folder
        self._versions = 0
        folder.mkdir()
        self.update(**files)
        for name in files:
            (folder / name).symlink_to(Path("..data", name))

    def update(self, **files: str) -> None:
        self._versions += 1
        version = self._folder / f"..2026_11_23_{self._versions}"
        version.mkdir()
        for name, text in files.items():
            (version / name).write_text(text)
        data, new = self._folder / "..data", self._folder / "..data_tmp"
        before = data.resolve() if data.exists() else None
        new.symlink_to(version.name)
        new.rename(data)
        if before is not None:
            shutil.rmtree(before)
