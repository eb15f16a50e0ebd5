"""Writes our batches into TransferQueue (0.1.11). To fetch, consume and clear them, use its own
client (`transfer_queue.get_client()`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from rollout_sched.integrations.transfer_queue import columns
from rollout_sched.live.trainer.samples import Batch, Sample


class BatchWriter:
    """Puts batches into one partition. Call `transfer_queue.init()` first.

    Write each key only once: TransferQueue replaces the sample with the same key, and does not hand
    it out again to readers that have consumed it. So a repeated prompt needs a new uid, as always.
    """

    def __init__(self, partition: str = "train") -> None:
        self.partition = partition

    async def put(self, batch: Batch) -> transfer_queue.KVBatchMeta | None:
        """Write all samples of a batch, or of a part of one, at once; None if it has none.

        Raises what TransferQueue raises. Then it is unknown which samples were written, and the
        batch may be put again.
        """
        if not batch.samples:
            return None
        return await transfer_queue.async_kv_batch_put(
            keys=[columns.key_of(sample) for sample in batch.samples],
            partition_id=self.partition,
            fields=fields_of(batch.samples),
            tags=[columns.tag_of(sample, batch) for sample in batch.samples],
        )


def fields_of(samples: Sequence[Sample]) -> TensorDict:
    """The columns of these samples, one row each; tokens are nested (jagged) tensors."""
    fields: dict[str, Any] = {
        name: _nested(rows, torch.int64) for name, rows in columns.ragged(samples).items()
    }
    for name, values in (columns.log_probs(samples) | columns.scores(samples)).items():
        fields[name] = _nested(values, torch.float32)
    for name, objects in columns.objects(samples).items():
        fields[name] = NonTensorStack(*objects)
    return TensorDict(fields, batch_size=[len(samples)])


def _nested(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
