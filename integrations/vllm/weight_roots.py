"""Folders in which weights on disk must lie, so that a trainer cannot have arbitrary files read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rollout_sched.core.errors import CallerError


class OutsideRoots(CallerError):
    """This path lies in no folder that --weights-root gives."""


class WeightRoots:
    """The allowed folders; if there are none, every folder is allowed.

    Symbolic links are resolved as far as this machine sees the path, `..` always.
    """

    def __init__(self, roots: Iterable[Path] = ()) -> None:
        self._roots = [Path(os.path.realpath(root)) for root in roots]

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return bool(self._roots)

    def check(self, path: str | Path) -> None:
        """Raises OutsideRoots. Reads the disk, which may block: do not call it on an event loop."""
        if not self._roots:
            return
        if not os.path.isabs(path):
            raise self._outside(path, "it is not an absolute path")
        try:
            real = Path(os.path.realpath(path))
        except ValueError as error:  # a null byte
            raise self._outside(path, str(error)) from error
        if not any(real.is_relative_to(root) for root in self._roots):
            led = "" if str(real) == str(path) else f"it leads to {real}"
            raise self._outside(path, led)

    def check_folder(self, folder: Path) -> None:
        """As `check`, for a folder and its entries, if this machine sees it."""
        self.check(folder)
        if self._roots and folder.is_dir():
            for entry in folder.iterdir():
                self.check(entry)

    def _outside(self, path: str | Path, why: str) -> OutsideRoots:
        roots = ", ".join(map(str, self._roots))
        return OutsideRoots(
            f"weights {str(path)!r} lie outside of {roots}{why and f': {why}'}; move them there, "
            "or start the gateway with a --weights-root that contains them"
        )
