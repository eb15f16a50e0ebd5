"""What a simulated instance cannot be started with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulators.instance.by_hand import instance


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_blocks": 0}, "kv_blocks"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens"),
        ({"watermark": 1.0}, "watermark"),
    ],
)
def test_settings_that_vllm_refuses_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        instance(**wrong)
