"""Folders of weights that vLLM can load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout_sched.integrations.torch import Checkpoints
from rollout_sched.integrations.vllm.checkpoint import check_checkpoint

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def read(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shard_bytes", [1, 10**6])
def test_what_is_written_is_read(tmp_path: Path, shard_bytes: int) -> None:
    folder = Checkpoints(tmp_path, shard_bytes=shard_bytes).write(3, WEIGHTS.items())
    assert folder == tmp_path / "3"
    check_checkpoint(folder)
    found = read(folder)
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    assert len(list(folder.iterdir())) == (2 if shard_bytes == 1 else 1)


def test_tensors_as_training_has_them(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)).t()
    folder = Checkpoints(tmp_path).write(0, [("a", parameter)])
    assert torch.equal(read(folder)["a"], parameter)


def test_a_version_is_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(0, [("old", torch.ones(1))])
    assert read(checkpoints.write(0, [("new", torch.ones(1))])).keys() == {"new"}


def test_one_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    def cut_short() -> list[tuple[str, torch.Tensor]]:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Checkpoints(tmp_path).write(0, cut_short())
    assert not (tmp_path / "0").exists()


def test_what_nobody_needs_is_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in range(5):
        checkpoints.write(version, WEIGHTS.items())
    checkpoints.delete_before(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "4"]
    checkpoints.delete_before(9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
