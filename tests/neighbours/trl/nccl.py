"""TRL's weight transfer without GPUs: its own calls, with another wire than NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from trl.generation import vllm_client

Send = Callable[[Any, Iterable[tuple[str, torch.Tensor]]], None]


def replace(
    monkeypatch: pytest.MonkeyPatch, join: Callable[[dict[str, Any]], Any], send: Send
) -> None:
    """`join` makes the trainer's end of the group that its init_info describes, `send` broadcasts
    named tensors over it. TRL refuses to begin on a CPU, so it is told that it has a GPU."""
    begin = vllm_client.VLLMClient.init_communicator

    def init_communicator(self: vllm_client.VLLMClient, device: object) -> None:
        begin(self, device="cuda")

    def broadcast(iterator: Any, group: Any, src: int, post_iter_func: Any) -> None:
        assert src == 0
        send(group, iterator)

    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", init_communicator)
    monkeypatch.setattr(vllm_client.VLLMClient, "close_communicator", lambda self: None)
    monkeypatch.setattr(vllm_client, "open_trainer_endpoint", join)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", broadcast)
