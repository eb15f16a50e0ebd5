"""Whole checkpoints pass, broken ones are named."""

from __future__ import annotations

import json
import os

import pytest

from rollout_sched.core.errors import CallerError
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


def index(name: str) -> bytes:
    return json.dumps({"weight_map": {"w": name}}).encode()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no weights"),
        ({INDEX: b"{"}, INDEX),
        ({INDEX: index("a\0b")}, "weights"),
        *(
            ({"a.safetensors": safetensors(), INDEX: index(name)}, "not a file of this folder")
            for name in ("../other/a.safetensors", "/etc/passwd", "sub/a.safetensors")
        ),
        *(
            ({"model.safetensors": content}, r"model\.safetensors")
            for content in (
                b"",
                b"\0" * 8,
                b"version https://git-lfs.github.com/spec/v1\n",
                safetensors()[:-1],
                safetensors(data=b"\0" * 9),
                safetensors()[:20],
                safetensors(head=b"no json"),
                safetensors(head=b"{}"),
                safetensors(head=b'{"w": {"data_offsets": [0]}}'),
            )
        ),
    ],
)
def test_a_broken_checkpoint_is_refused(tmp_path, files, says):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CallerError, match=says):
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


def test_a_head_is_not_read_beyond_the_formats_limit(tmp_path):
    """The file is sparse: it takes no room, but would be read into memory."""
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write((10**9).to_bytes(8, "little"))
        stream.truncate(2 * 10**9)
    with pytest.raises(CallerError, match="not a safetensors file"):
        check_checkpoint(tmp_path)
