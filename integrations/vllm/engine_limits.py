"""Settings of an engine beyond what a scheduler needs, as far as the server reports them."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout_sched.integrations.vllm import metrics_text
from rollout_sched.integrations.vllm.control import ServerControl, decoded
from rollout_sched.integrations.vllm.protocol import endpoints


class EngineLimits(msgspec.Struct, frozen=True):
    """None for what is not reported; sizes in tokens.

    block_size              block size of the KV cache
    prefix_caching          whether prefix caching is on
    max_num_batched_tokens  the most tokens of one step
    version                 vLLM's version
    """

    block_size: int | None = None
    prefix_caching: bool | None = None
    max_num_batched_tokens: int | None = None
    version: str | None = None


async def read_limits(control: ServerControl) -> EngineLimits:
    """From /metrics, /version and, in development mode, /server_info. Raises InstanceError."""
    metrics = await control.get(endpoints.METRICS)
    labels = metrics_text.cache_labels(metrics.body) if metrics.status == 200 else {}
    block_size, caching = labels.get("block_size", ""), labels.get("enable_prefix_caching", "")
    scheduler = await _told(control, endpoints.SERVER_INFO, "vllm_config", "scheduler_config")
    tokens = scheduler.get("max_num_batched_tokens")
    told = await _told(control, endpoints.VERSION)
    version = told.get("version")
    return EngineLimits(
        int(block_size) if block_size.isdecimal() and 0 < len(block_size) < 9 else None,
        {"True": True, "False": False}.get(caching),
        tokens if isinstance(tokens, int) and tokens > 0 else None,
        version if isinstance(version, str) else None,
    )


async def _told(control: ServerControl, path: str, *keys: str) -> dict[str, Any]:
    """A table in a JSON answer; empty if there is none."""
    answer = await control.get(path)
    table: Any = decoded(path, answer.body, dict[str, Any]) if answer.status == 200 else {}
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}
