"""A packed row is to a model of transformers what the padded rows are."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollout_sched.integrations.torch import packed, padded
from rollout_sched.live.samples import Batch, Sample
from tests.neighbours.trl import stage


def sample(uid: str, prompt: list[int], response: list[int]) -> Sample:
    ones = [1] * len(response)
    return Sample(uid, 0, prompt, response, ones, None, ones, [], 0, "stop", "COMPLETED", 0)


BATCH = Batch(0, 0, [sample("a", [5, 6, 7], [8, 9]), sample("b", [11], [12, 13, 14, 15, 16, 17])])


def test_samples_do_not_see_each_other(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        stage.write_model(tmp_path), dtype=torch.float32
    ).eval()
    rows, row = padded(BATCH, pad_token_id=0), packed(BATCH)
    with torch.no_grad():
        apart = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        together = model(
            input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False
        ).logits
    here = rows["attention_mask"].bool()
    torch.testing.assert_close(together[0], apart[here], atol=1e-4, rtol=1e-4)
