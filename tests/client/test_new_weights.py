"""How a trainer says where new weights are."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.integrations.vllm.weight_updates import (
    Applied,
    Apply,
    Reload,
    Transfer,
    WeightUpdate,
    is_coroutine,
    update_of,
)

RELOAD, TRANSFER = Reload("/ckpt"), Transfer({"names": []})


@pytest.mark.parametrize(
    ("apply", "update"),
    [
        (RELOAD, WeightUpdate(3, reload=RELOAD)),
        (TRANSFER, WeightUpdate(3, transfer=TRANSFER)),
        (Applied(), WeightUpdate(3, applied=True)),
    ],
)
def test_message_updates_are_sent_as_they_are(apply: Apply, update: WeightUpdate) -> None:
    assert not is_coroutine(apply)
    assert update_of(3, apply) == update


def test_coroutine_is_no_message_update() -> None:
    async def load(client: Any, version: int) -> None: ...

    assert is_coroutine(load)
