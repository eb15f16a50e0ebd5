"""verifiers' environments and renderers' client, through the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adder
import pytest
import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.base import load_tokenizer
from renderers.client import MalformedGenerateResponseError, generate
from renderers.configs import Qwen3RendererConfig
from tokenizer import SIZE, make_tokenizer
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from tests.neighbours.fleet import Fleet, fleet

#: Of home, so many others may be there that nobody leaves it (`margin` of `[affinity]`).
ROLLOUTS = 3
RENDERER = Qwen3RendererConfig(enable_thinking=False)


@pytest.fixture(scope="module")
def ours() -> Iterator[Fleet]:
    """Where nothing but sessions keeps two turns together: requests are dealt out in turn."""
    fake = ["--speed", "50", "--median-tokens", "20", "--vocab-size", str(SIZE)]
    with fleet(2, policy="round_robin_sync", fake=fake) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


def roll_out(ours: Fleet, client: Any, sampling: dict[str, Any]) -> list[vf.Trace]:
    """The traces of some rollouts at once."""
    config: EnvConfig = resolve_env_config(
        {"taskset": {"id": "adder"}, "agent": {"runtime": {"type": "subprocess"}, "max_turns": 9}}
    )
    env = load_environment(config)
    context = vf.ModelContext(ours.model, client, vf.Sampling(max_tokens=200, **sampling))

    async def play() -> list[vf.Trace]:
        async with env.serving():
            (task,) = env.taskset
            slots = env.slots(task, ROLLOUTS)
            episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
        return [trace for episode in episodes for trace in episode.traces]

    return asyncio.run(asyncio.wait_for(play(), 300))


def calls_of(trace: vf.Trace) -> list[tuple[str, Any]]:
    messages = [node.message for node in trace.nodes if node.sampled]
    return [(call.name, call.arguments) for m in messages for call in m.tool_calls or ()]


def assert_played(ours: Fleet, traces: list[vf.Trace], sessions: float) -> None:
    """Each has called its tool twice and was rewarded, its session where it began."""
    assert [[str(error) for error in trace.errors] for trace in traces] == [[]] * ROLLOUTS
    assert [len(trace.calls) for trace in traces] == [3] * ROLLOUTS
    for trace in traces:
        assert [name for name, _ in calls_of(trace)] == ["add", "add"]
        assert trace.rewards["added"].value == 1.0
    assert ours.gateway.metric("rollout_sched_sessions") == sessions + ROLLOUTS
    assert ours.gateway.metric("rollout_sched_session_moves_total") == 0


def said(tokenizer: Any) -> list[list[int]]:
    """What a model would say that calls the tool for each sum, in tokens."""
    texts = [
        f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>'
        for arguments in ('{"a": 1, "b": 2}', '{"a": 3, "b": 4}')
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def test_an_environment_with_a_tool_through_the_train_client(ours: Fleet, folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    before = ours.gateway.metric("rollout_sched_sessions")
    client = vf.TrainClientConfig(
        base_url=f"{ours.url}/v1",
        api_key_var="NO_KEY",
        renderer=RENDERER,
        renderer_model_name=str(folder),
    )
    ids = said(tokenizer)
    sampling = {"extra_args": {"fake_response_ids": ids}, "cache_salt": "policy-7"}
    traces = roll_out(ours, client, sampling)
    assert_played(ours, traces, before)
    for trace in traces:
        (branch,) = trace.branches
        sampled = [node for node in trace.nodes if node.sampled]
        for node, whole in zip(sampled, ids, strict=False):
            assert [t for t, mine in zip(node.token_ids, node.mask, strict=True) if mine] == whole
        for node in sampled:
            assert len(node.logprobs) == sum(node.mask) > 0
            assert all(-10 < value <= 0 for value in node.logprobs)
        assert max(branch.token_ids) < SIZE


def test_an_environment_with_a_tool_through_the_eval_client(ours: Fleet) -> None:
    before = ours.gateway.metric("rollout_sched_sessions")
    client = vf.EvalClientConfig(base_url=f"{ours.url}/v1", api_key_var="NO_KEY")
    assert_played(ours, roll_out(ours, client, {}), before)


def ask(url: str, model: str, folder: Path, **asked: Any) -> dict[str, Any]:
    """A response of renderers' own client."""

    async def call() -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return await generate(
                client=client,
                renderer=create_renderer(load_tokenizer(str(folder)), RENDERER),
                messages=[{"role": "user", "content": adder.QUESTION * 20}],
                model=model,
                sampling_params={"max_tokens": 5, "ignore_eos": True},
                **asked,
            )

    return asyncio.run(asyncio.wait_for(call(), 120))


def test_what_vllm_s_spelling_lacks_is_there(ours: Fleet, folder: Path) -> None:
    with pytest.raises(MalformedGenerateResponseError):
        ask(ours.instances[0].url, ours.model, folder)
    answer = ask(ours.url, ours.model, folder)
    assert len(answer["completion_ids"]) == len(answer["completion_logprobs"]) == 5


def test_salt_priority_and_session_mean_what_they_say(ours: Fleet, folder: Path) -> None:
    def hits(salt: str) -> float:
        """Tokens of a prompt found in a prefix cache."""
        before = sum(one.metric("vllm:prefix_cache_hits_total") for one in ours.instances)
        headers = {"X-Session-ID": "one place"}
        ask(ours.url, ours.model, folder, cache_salt=salt, priority=1, extra_headers=headers)
        return sum(one.metric("vllm:prefix_cache_hits_total") for one in ours.instances) - before

    assert hits("policy-1") == 0
    assert hits("policy-1") > 100
    assert hits("policy-2") == 0
    assert hits("policy-1") > 100
