"""Paths within the allowed folders pass; what leads out of them is refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.vllm.weights import OutsideRoots, WeightRoots


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ckpt" / "v1").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    return tmp_path / "ckpt"


def test_without_roots_everything_passes() -> None:
    roots = WeightRoots()
    assert not roots.known
    for path in ("relative", "/anywhere", "s3://bucket/x", "\0"):
        roots.check(path)


def test_what_lies_within_passes(root: Path) -> None:
    roots = WeightRoots([root])
    for path in (root, root / "v1", root / "not_yet" / "there", f"{root}/v1/../v2", f"{root}//v1"):
        roots.check(path)


@pytest.mark.parametrize(
    "path",
    ["{up}/other", "{root}-2", "{root}/../other", "{root}/v1/../../other", "/", "/etc/passwd"],
)
def test_what_lies_outside_is_refused(root: Path, path: str) -> None:
    named = path.format(root=root, up=root.parent)
    with pytest.raises(OutsideRoots, match="--weights-root") as raised:
        WeightRoots([root]).check(named)
    assert str(root) in str(raised.value)
    assert repr(named) in str(raised.value)


@pytest.mark.parametrize(
    "path", ["v1", "org/model", "", "~/x", "file:///ckpt", "s3://x/y", "./v1", "/ckpt\0/x"]
)
def test_what_is_no_path_of_this_machine_is_refused(root: Path, path: str) -> None:
    with pytest.raises(OutsideRoots):
        WeightRoots([root]).check(path)


def test_links_are_followed(root: Path) -> None:
    outside = root.parent / "other"
    (root / "latest").symlink_to(root / "v1")
    (root / "away").symlink_to(outside)
    (outside / "back").symlink_to(root / "v1")
    (root / "loop").symlink_to(root / "loop")
    roots = WeightRoots([root])
    roots.check(root / "latest")
    roots.check(outside / "back")
    with pytest.raises(OutsideRoots, match=f"leads to {outside}"):
        roots.check(root / "away" / "v1")
    roots.check(root / "loop")  # leads nowhere, so not outside


def test_a_root_may_be_a_link_and_there_may_be_several(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    roots = WeightRoots([root.parent / "link", root.parent / "other"])
    roots.check(root / "v1")
    roots.check(root.parent / "link" / "v1")
    roots.check(root.parent / "other")
    with pytest.raises(CallerError):
        roots.check(root.parent)


def test_what_lies_in_a_folder_is_checked_too(root: Path) -> None:
    secret = root.parent / "other" / "secret.safetensors"
    secret.write_bytes(b"")
    (root / "v1" / "sound.safetensors").write_bytes(b"")
    roots = WeightRoots([root])
    roots.check_folder(root / "v1")
    roots.check_folder(root / "nowhere")  # only the instances may see it
    (root / "v1" / "model.safetensors").symlink_to(secret)
    with pytest.raises(OutsideRoots, match=r"model\.safetensors"):
        roots.check_folder(root / "v1")
