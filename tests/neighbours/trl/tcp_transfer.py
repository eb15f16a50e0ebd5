"""A weight-transfer backend for the tests: NCCL's calls and ranks over TCP, without a GPU.

vLLM's own NCCL backend but for the wire: its rendezvous is the same (`StatelessProcessGroup`), and
what goes over it are pickled tensors. vLLM finds it as a general plugin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

NAME = "test_tcp"


def join(init_info: dict[str, Any]) -> Any:
    """The trainer's end of the group: rank 0."""
    return _group(init_info["master_address"], init_info["master_port"], 0, init_info["world_size"])


def send(group: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for _, tensor in tensors:
        group.broadcast(tensor.detach(), src=0)


def _group(host: str, port: int, rank: int, world_size: int) -> Any:
    """All ranks; it hangs, as NCCL does, where two are the same."""
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
    assert group.all_gather_obj(rank) == list(range(world_size))
    return group


def register() -> None:
    """What vLLM calls in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class TcpTransfer(NCCLWeightTransferEngine):  # type: ignore[misc, unused-ignore]
        def init_transfer_engine(self, init_info: Any) -> None:
            rank = self.parallel_config.rank + init_info.rank_offset
            self.model_update_group = _group(
                init_info.master_address, init_info.master_port, rank, init_info.world_size
            )

        def update_weights(self, update_info: Any) -> None:
            # The base class waits for an accelerator, which a CPU has not.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            nothing = torch.empty(0)
            self.model.load_weights(
                (name, self.model_update_group.broadcast(nothing, src=0))
                for name in update_info.names
            )

        def shutdown(self) -> None: ...

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, TcpTransfer)
