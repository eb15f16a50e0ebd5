"""Verified resume on real servers: what is kept is what the new weights would have said, or what
they pass by the ratios that vLLM reports."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_sched.client import Prompt, Reload, RolloutScheduler, Sample
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.live.ports import Order, Output, PromptToken
from rollout_sched.live.requests.token_payload import DraftTest, Piece, TokenPayload
from tests.vllm import servers

DICE = random.Random(11)
PROMPTS = [[DICE.randrange(3, 2000) for _ in range(40)] for _ in range(6)]
TOKENS = 300
GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
DRAWN = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0}
LIMIT_S = 180
POLICY = """
[batching]
use = "fully_async"
[freshness]
use = "bounded"
max_staleness = 1
[interruption]
use = "partial"
kv = "verify"
leniency = {leniency}
"""


def near(model: Path, to: Path, scale: float) -> Path:
    """A copy of a model a small step further, as a trainer makes one."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, to)
    torch.manual_seed(5)
    file = to / "model.safetensors"
    weights = {
        name: w + scale * w.std() * torch.randn_like(w) if "norm" not in name else w
        for name, w in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return to


class Fleet:
    """Two servers, with the old and with the new weights."""

    def __init__(self, old: Path, new: Path, logs: Path, stack: ExitStack) -> None:
        self.old, self.new = old, new
        flags = ("--enable-scale-out",)
        started = [
            stack.enter_context(servers.serving(model, logs, *flags, dev_mode=True, core=core))
            for core, model in enumerate((old, new))
        ]
        self.urls = [server.wait() for server in started]


@pytest.fixture(scope="module")
def fleet(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("near")
    with ExitStack() as stack:
        yield Fleet(models[0], near(models[0], folder / "tiny-near", 0.02), folder, stack)


async def made(url: str, sampling: dict[str, Any], tokens: int, salt: str) -> list[Output]:
    client = HttpInstance(url)
    await client.describe()
    orders = [Order(f"{salt}{n}", ids, tokens, salt, sampling) for n, ids in enumerate(PROMPTS)]
    outputs = await asyncio.gather(*(client.generate(order) for order in orders))
    await client.close()
    return outputs


def common(one: list[int], other: list[int]) -> int:
    """Tokens of their common beginning."""
    pairs = zip(one, other, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(one))


def play(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(scene, LIMIT_S))


async def interrupted(fleet: Fleet, policy: Path, sampling: dict[str, Any]) -> list[Sample]:
    """A batch made by the first server, which gets the new weights in the middle of it."""
    url = fleet.urls[0]
    async with RolloutScheduler.from_toml(policy, [url], prompts_per_step=len(PROMPTS)) as rollouts:
        await rollouts.submit(
            Prompt(f"g{n}", ids, 1, TOKENS, sampling) for n, ids in enumerate(PROMPTS)
        )
        await rollouts.close_submissions()
        batch = asyncio.create_task(rollouts.next_batch())
        client = HttpInstance(url)
        await client.describe()
        start = (await client.gauges()).generated_tokens
        while (await client.gauges()).generated_tokens < start + 60 * len(PROMPTS):
            await asyncio.sleep(0.01)
        await client.close()
        assert not batch.done()
        await rollouts.publish_weights(1, Reload(str(fleet.new)), wait=True)
        whole = await batch
        assert whole is not None
        assert (await rollouts.state())["anomalies"] == {}
        await rollouts.publish_weights(2, Reload(str(fleet.old)), wait=True)
        return sorted(whole.samples, key=lambda sample: sample.uid)


def test_greedy_equals_what_the_new_weights_make_of_the_prompt(
    fleet: Fleet, tmp_path: Path
) -> None:
    """And what is kept is the beginning that old and new weights have in common."""
    policy = tmp_path / "verify.toml"
    policy.write_text(POLICY.format(leniency=0.0))

    async def scene() -> None:
        old = await made(fleet.urls[0], GREEDY, TOKENS, "old")
        fresh = await made(fleet.urls[1], GREEDY, TOKENS, "fresh")
        samples = await interrupted(fleet, policy, GREEDY)
        kept = []
        for sample, before, after in zip(samples, old, fresh, strict=True):
            assert sample.response_ids == after.token_ids
            assert sample.rollout_log_probs == pytest.approx(after.logprobs, abs=1e-3)
            verified = [span for span in sample.segments if span.verified]
            same = common(before.token_ids, after.token_ids)
            assert sum(span.end for span in verified) <= same
            kept.append((sum(span.end for span in verified), same))
            assert set(sample.versions) == {1}
            if verified:
                end = verified[0].end
                assert sample.drawn_log_probs is not None
                before_cut = pytest.approx(before.logprobs[:end], abs=1e-3)
                assert sample.drawn_log_probs[:end] == before_cut
        # Cut where the two part, unless the draft ended before.
        assert any(0 < passed == same < TOKENS for passed, same in kept), kept

    play(scene())


def thought_of(url: str, context: list[int]) -> list[PromptToken]:
    """What a server thinks of each token of a context but the first, read as it comes."""
    sampling = {"max_tokens": 1, "prompt_logprobs": 0}
    body = {"model": "tiny", "token_ids": context, "sampling_params": sampling}
    request = urllib.request.Request(
        f"{url}/inference/v1/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        told = json.load(answer)["prompt_logprobs"]
    assert told[0] is None
    own = [by_id[str(token)] for token, by_id in zip(context[1:], told[1:], strict=True)]
    return [PromptToken(entry["logprob"], entry["rank"]) for entry in own]


@pytest.mark.parametrize("endpoint", ["generate", "completions"])
@pytest.mark.parametrize("leniency", [0.0, 0.5])
def test_sampled_tokens_pass_by_the_ratios_that_vllm_reports(
    fleet: Fleet, leniency: float, endpoint: Any
) -> None:
    """Drafts of one server are verified by the other."""
    tokens = 60
    test = DraftTest(leniency, seed=3)

    async def scene() -> None:
        drafts = await made(fleet.urls[0], {**DRAWN, "seed": 7}, tokens, f"draft{endpoint}")
        client = HttpInstance(fleet.urls[1], endpoint=endpoint)
        await client.describe()
        kept = []
        for number, (prompt, draft) in enumerate(zip(PROMPTS, drafts, strict=True)):
            assert draft.logprobs is not None
            payload = TokenPayload(prompt, DRAWN, test=test)
            payload.transcript.keep(1, tokens, Piece(draft.token_ids, draft.logprobs))
            dispatch = Dispatch(
                f"g{number}/0", 2, "b", 40 + tokens, 10, 1, tokens, draft=((0, tokens),)
            )

            async def passed(
                count: int, payload: TokenPayload = payload, dispatch: Dispatch = dispatch
            ) -> Dispatch:
                payload.transcript.cut(tokens - count)
                kept.append(count)
                return msgspec.structs.replace(dispatch, max_new_tokens=5, draft=())

            order = f"{endpoint}{leniency}{number}"
            outcome = await payload.attempt_verified(client, dispatch, order, passed)
            assert outcome.tokens == 5
            new = thought_of(fleet.urls[1], [*prompt, *draft.token_ids])[len(prompt) - 1 :]
            expected = test.passed(dispatch, draft.logprobs, new)
            assert kept[-1] == expected
            verified = [token.logprob for token in new[:expected]]
            assert payload.transcript.logprobs == pytest.approx(verified, abs=1e-4)
            assert all(math.isfinite(token.logprob) for token in new)
        assert 0 < sum(kept) < tokens * len(kept), kept
        await client.close()

    play(scene())
