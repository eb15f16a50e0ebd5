"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout_sched.process import whole_file


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_breaks_off_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"old")

    def write() -> None:
        with whole_file(path) as file:
            file.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_on_the_disk_before_it_takes_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("fsync"), sync(number))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (done.append("replace"), replace(self, to))
    )
    with whole_file(tmp_path / "a") as file:
        file.write(b"x")
    assert done == ["fsync", "replace"]


def test_others_may_read_it_as_they_may_any_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with whole_file(tmp_path / "whole") as file:
        file.write(b"x")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"), whole_file(tmp_path / "nowhere" / "a"):
        pass
