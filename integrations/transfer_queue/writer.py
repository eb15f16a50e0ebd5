"""Our batches into TransferQueue (0.1.11), and nothing else: fetching, consuming and clearing are
its own (`transfer_queue.get_client()`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from rollout_sched.integrations.transfer_queue import columns
from rollout_sched.live.samples import Batch, Sample


class BatchWriter:
    """Puts batches into one partition. `transfer_queue.init()` comes first.

    A key is written once: TransferQueue replaces what has the same key, and does not hand it out
    again to who has consumed it. So prompts that come again have a uid of their own, as always.
    """

    def __init__(self, partition: str = "train") -> None:
        self.partition = partition

    async def put(self, batch: Batch) -> transfer_queue.KVBatchMeta | None:
        """Write all samples of a batch, or of a part of one, at once; None where it has none.

        Raises what TransferQueue raises; then nothing of it may be relied on, and it may be put
        again.
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
    """The columns of these samples, a row for each; tokens as nested (jagged) tensors."""
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
