"""Whole checkpoints pass, broken ones are named."""

from __future__ import annotations

import json
import os

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.vllm.checkpoint import INDEX, check_checkpoint


def safetensors(data=b"\0" * 8, head=None):
    if head is None:
        tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        head = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    return len(head).to_bytes(8, "little") + head + data


def test_a_complete_file_passes(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    check_checkpoint(tmp_path)


def test_other_formats_need_only_be_there(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    check_checkpoint(tmp_path)


def test_all_files_of_the_index_must_exist(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(safetensors())
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CallerError, match=r"b\.safetensors"):
        check_checkpoint(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(safetensors())
    check_checkpoint(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(CallerError, match="no such folder"):
        check_checkpoint(tmp_path / "nowhere")


def test_an_empty_folder(tmp_path):
    with pytest.raises(CallerError, match="has no weights"):
        check_checkpoint(tmp_path)


def test_a_broken_index(tmp_path):
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CallerError, match=INDEX):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        b"version https://git-lfs.github.com/spec/v1\n",
        safetensors()[:-1],
        safetensors(data=b"\0" * 9),
        safetensors()[:20],
        safetensors(head=b"no json"),
        safetensors(head=b"{}"),
        safetensors(head=b'{"w": {"data_offsets": [0]}}'),
    ],
)
def test_a_file_that_is_not_whole(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CallerError, match=r"model\.safetensors"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    """To open one is to wait until somebody writes to it."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(CallerError, match=f"{name}: is not a file"):
        check_checkpoint(tmp_path)


def test_a_device_is_not_read(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(CallerError, match="is not a file"):
        check_checkpoint(tmp_path)


def test_an_index_that_names_what_no_path_can_be(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "a\0b"}}))
    with pytest.raises(CallerError, match="weights"):
        check_checkpoint(tmp_path)


def test_a_head_is_not_read_beyond_the_formats_limit(tmp_path):
    """The file is sparse: it takes no room, but would be read into memory."""
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write((10**9).to_bytes(8, "little"))
        stream.truncate(2 * 10**9)
    with pytest.raises(CallerError, match="not a safetensors file"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../other/a.safetensors", "/etc/passwd", "sub/a.safetensors"])
def test_an_index_names_files_of_its_own_folder_alone(tmp_path, name):
    (tmp_path / "a.safetensors").write_bytes(safetensors())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CallerError, match="not a file of this folder"):
        check_checkpoint(tmp_path)
