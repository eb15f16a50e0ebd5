"""Who brings two real servers their weights: the gateway, or the trainer by itself, beside it.

Every token's version must be what the server's own spans say, and every token what those weights
make. (Through the gateway: test_trainer_through_gateway.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.test_trainer_through_gateway import (
    LIMIT_S,
    PROMPTS,
    TOKENS,
    Trainer,
    segments,
    spans,
    trainer,
    urls,
)

__all__ = ["urls"]

POLICY = """
[batching]
use = "fully_async"
[freshness]
use = "unbounded"
[interruption]
use = "partial"
kv = "recompute"
at_update = "{at_update}"
"""

Update = Callable[[Trainer, list[str], Path, int], Awaitable[None]]


async def we_drive(ours: Trainer, urls: list[str], model: Path, version: int) -> None:
    reload = {"path": str(model)}
    await ours.post("/rollout/v1/weights", {"version": version, "reload": reload, "wait": True})


def around_us(mode: str) -> Update:
    """The trainer knows the servers, and never says anything to the gateway."""

    async def update(ours: Trainer, urls: list[str], model: Path, version: int) -> None:
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        for url in urls:
            await ours.post(f"/pause?mode={mode}&clear_cache=true", url=url)
        for url in urls:
            await ours.post("/collective_rpc", rpc, url)
            await ours.post("/update_weight_version", {"new_version": str(version)}, url)
        for url in urls:
            await ours.post("/resume", url=url)

    return update


WAYS: dict[str, tuple[Update, str]] = {
    "we drive, in place": (we_drive, "in_place"),
    "we drive, resubmitted": (we_drive, "resubmit"),
    "around us, kept": (around_us("keep"), "in_place"),
    "around us, aborted": (around_us("abort"), "in_place"),
}


@pytest.mark.parametrize("way", WAYS)
def test_versions_are_the_servers_own_and_tokens_those_of_the_weights(
    way: str, urls: list[str], models: list[Path], tmp_path: Path
) -> None:
    update, at_update = WAYS[way]
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(at_update=at_update))

    async def scene() -> None:
        async with trainer(urls, str(policy)) as ours:
            start = ours.version
            alone = await asyncio.gather(
                *(ours.generate(ids, url=urls[0], salt=f"{way}{start}") for ids in PROMPTS)
            )
            asking = [asyncio.create_task(ours.generate(ids)) for ids in PROMPTS]
            await ours.until_generated(200)
            await update(ours, urls, models[1], start + 1)
            changed = []
            for number, answer in enumerate(await asyncio.gather(*asking)):
                made = answer["choices"][0]["token_ids"]
                assert len(made) == TOKENS
                (version, _, cut), *rest = segments(answer)
                assert version == str(start)
                assert made[:cut] == alone[number]["choices"][0]["token_ids"][:cut]
                if "weight_versions" in answer["choices"][0]:
                    assert segments(answer) == spans(answer)
                if rest:
                    changed.append(number)
                    assert [version for version, _, _ in rest] == [str(start + 1)]
                    salt = f"{way}{start}{number}"
                    fresh = await ours.generate(
                        PROMPTS[number] + made[:cut], TOKENS - cut, urls[0], salt
                    )
                    assert made[cut:] == fresh["choices"][0]["token_ids"]
            assert changed
            while ours.version != start + 1:
                await asyncio.sleep(0.05)
            late = await ours.generate(PROMPTS[0])
            assert segments(late) == spans(late) == [(str(start + 1), 0, TOKENS)]
            await update(ours, urls, models[0], start + 2)
            while ours.version != start + 2:
                await asyncio.sleep(0.05)
            again: Any = await ours.generate(PROMPTS[0])
            assert again["choices"][0]["token_ids"] == alone[0]["choices"][0]["token_ids"]
            assert segments(again) == spans(again) == [(str(start + 2), 0, TOKENS)]

    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))
