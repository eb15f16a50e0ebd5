"""Two real vLLM servers whose drafter is the model itself: one always drafts, the other only in
thin batches. Speculation changes no greedy output, whatever the scheduler does to it; the counters
are those of the simulated instance.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.cli import main
from rollout_sched.client import Prompt, Reload, RolloutScheduler
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.integrations.vllm.weights import WeightTransfer
from rollout_sched.live.instances.health import DraftAcceptance
from rollout_sched.live.ports import Gauges, Order, Output
from rollout_sched.simulators.instance.model import (
    CostModel,
    InstanceSpec,
    SimGauges,
    SimRequest,
    Speculation,
)
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.replay.scenario import load_scenario
from tests.vllm import disk_transfer, servers
from tests.vllm.test_scheduler_differential import COST, RealInstance

LIMIT_S = 180
pytestmark = pytest.mark.real_time(LIMIT_S)

GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
DICE = random.Random(5)
PROMPTS = [[DICE.randrange(3, 2000) for _ in range(60)] for _ in range(4)]
DRAFTS = 3
#: The second server drafts for so many sequences at most.
THIN = 2
TOKENS = 201
POLICY = servers.chunked(70)


@pytest.fixture(scope="module")
def urls(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    plugin, logs = tmp_path_factory.mktemp("plugin"), tmp_path_factory.mktemp("logs")
    disk_transfer.install(plugin)
    drafter = {"method": "draft_model", "model": str(models[0]), "num_speculative_tokens": DRAFTS}
    rows = [[1, THIN, DRAFTS], [THIN + 1, servers.MAX_NUM_SEQS, 0]]
    thin = {**drafter, "num_speculative_tokens_per_batch_size": rows}

    def serving(core: int, config: dict[str, Any]) -> Any:
        flags = ["--enable-scale-out", "--speculative-config", json.dumps(config)]
        flags += ["--weight-transfer-config", f'{{"backend": "{disk_transfer.NAME}"}}']
        return servers.serving(
            models[0], logs, *flags, dev_mode=True, core=core, PYTHONPATH=str(plugin)
        )

    with serving(0, drafter) as always, serving(1, thin) as by_batch:
        yield [always.wait(), by_batch.wait()]


@pytest.fixture(scope="module")
def plain(engine: Any, models: list[Path]) -> list[list[int]]:
    """What the model makes of each prompt without a drafter."""
    from vllm import SamplingParams

    # Tests before this one have left a scheduler with few blocks, other weights, and requests that
    # the engine waits for and its scheduler does not know.
    RealInstance(engine, InstanceSpec(COST, 30, 32, max_num_seqs=4)).set_version(0, models[0])
    parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=TOKENS)
    found = []
    for number, ids in enumerate(PROMPTS):
        engine.add_request(f"plain-{number}", {"prompt_token_ids": ids}, parameters)
        while not (ended := [each for each in engine.step() if each.finished]):
            pass
        found.append(list(ended[0].outputs[0].token_ids))
    return found


@asynccontextmanager
async def described(url: str) -> AsyncIterator[HttpInstance]:
    instance = HttpInstance(url)
    try:
        await instance.describe()
        yield instance
    finally:
        await instance.close()


async def counted(instance: HttpInstance, *orders: Order) -> tuple[list[Output], list[int]]:
    """The outputs, and how often it drafted for them, drafted tokens, and accepted ones."""
    before = await settled(instance)
    outputs = await asyncio.gather(*map(instance.generate, orders))
    after = await settled(instance)
    names = ("drafts", "drafted_tokens", "accepted_tokens")
    return list(outputs), [getattr(after, name) - getattr(before, name) for name in names]


async def settled(instance: HttpInstance) -> Gauges:
    """When nothing changes: counters lag by a step."""
    last = await instance.gauges()
    while True:
        await asyncio.sleep(0.3)
        now = await instance.gauges()
        if now == last and not now.running:
            return now
        last = now


def orders(lengths: list[int], salt: str) -> list[Order]:
    return [
        Order(f"{salt}{number}", PROMPTS[number % len(PROMPTS)], length, salt, GREEDY)
        for number, length in enumerate(lengths)
    ]


def simulated(lengths: list[int], drafts: Speculation) -> SimGauges:
    """The gauges of a simulated instance after the same requests."""
    instance = SimInstance(InstanceSpec(CostModel(1.0, 1.0, 1e-3), 512, speculation=drafts))
    for number, length in enumerate(lengths):
        instance.submit(SimRequest(number, 60, length, length, number, 0, number), 0.0)
    while instance.next_at() < float("inf"):
        instance.advance(instance.next_at())
    return instance.gauges()


async def test_every_draft_of_the_model_itself_is_accepted(
    urls: list[str], plain: list[list[int]]
) -> None:
    """Each step makes a token more than it drafts, of each sequence, as the simulated one does."""
    lengths = [41, 81, 121, TOKENS]  # one token of the prefill, and whole steps
    async with described(urls[0]) as instance:
        outputs, counts = await counted(instance, *orders(lengths, "all"))
    assert [output.token_ids for output in outputs] == [
        ids[:length] for ids, length in zip(plain, lengths, strict=True)
    ]
    told = simulated(lengths, Speculation(DRAFTS, 1.0, schedule="always"))
    assert counts == [told.drafts, told.drafted_tokens, told.accepted_tokens]
    assert counts[1] == counts[2] == DRAFTS * counts[0]


async def test_tokens_come_by_the_step(urls: list[str]) -> None:
    ends: list[int] = []

    def note(token_ids: Any, _: Any) -> None:
        ends.append((ends[-1] if ends else 0) + len(token_ids))

    async with described(urls[0]) as instance:
        order = Order("steps", PROMPTS[0], TOKENS, "steps", GREEDY, stream_every=1)
        await instance.generate(order, note)
    assert len(ends) > 5
    assert {(end - 1) % (DRAFTS + 1) for end in ends} == {0}


async def test_a_schedule_drafts_only_in_thin_batches(
    urls: list[str], plain: list[list[int]]
) -> None:
    async with described(urls[1]) as instance:
        _, thin = await counted(instance, *orders([TOKENS] * THIN, "thin"))
        outputs, thick = await counted(instance, *orders([TOKENS] * 8, "thick"))
    assert thin == [2 * 50, 2 * 150, 2 * 150]
    # Requests arrive one after the other, and the last tokens are made by fewer of them.
    assert thick[0] < thin[0] / 2
    assert [output.token_ids for output in outputs] == plain * 2


async def test_interruptions_and_moves_change_no_greedy_response(
    urls: list[str], plain: list[list[int]], models: list[Path], tmp_path: Path
) -> None:
    """Each response is cut twice and goes on elsewhere; an update pauses and aborts all of them."""
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    async with RolloutScheduler.from_toml(
        path, urls, prompts_per_step=len(PROMPTS), version=0
    ) as rollouts:
        await rollouts.submit(
            Prompt(f"g{number}", ids, 1, TOKENS, GREEDY) for number, ids in enumerate(PROMPTS)
        )
        await rollouts.close_submissions()
        batch = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(0.2)
        await rollouts.publish_weights(1, Reload(str(models[0])), wait=True)
        whole = await batch
        assert whole is not None
        assert (await rollouts.state())["anomalies"] == {}
    samples = sorted(whole.samples, key=lambda sample: sample.uid)
    assert [sample.response_ids for sample in samples] == plain
    assert len({span.instance for sample in samples for span in sample.segments}) == 2


async def test_a_drafter_is_accepted_again_after_its_update(
    urls: list[str], models: list[Path]
) -> None:
    """After new weights nothing is, and the log would say so; outputs do not depend on it."""

    def file(number: int) -> dict[str, str]:
        return {"path": str(models[number] / "model.safetensors")}

    told: list[str] = []
    made: list[list[list[int]]] = []
    shares: list[float] = []
    # Version 1 leaves the drafter as it is, 2 updates it, 3 brings the first weights back.
    transfer = WeightTransfer(
        lambda version: file(0 if version == 3 else 1),
        {},
        list,
        lambda version: {1: None, 2: file(1), 3: file(0)}[version],
    )
    async with described(urls[0]) as instance:
        for version in range(4):
            if version:
                await instance.pause("abort", clear_cache=True)
                await transfer(instance, version)
                await instance.resume()
            drafts = DraftAcceptance(0.1)
            drafts.note(await settled(instance))
            lengths = [TOKENS] * len(PROMPTS)
            outputs, counts = await counted(instance, *orders(lengths, f"v{version}"))
            made.append([output.token_ids for output in outputs])
            shares.append(counts[2] / counts[1])
            told.append(drafts.note(await settled(instance)))
    assert shares[0] == shares[2] == shares[3] == 1.0
    assert shares[1] < 0.02
    assert made[1] == made[2] != made[0] == made[3]
    assert [bool(line) for line in told] == [False, True, False, False]


def test_a_calibration_counts_what_the_server_drafts(
    urls: list[str], models: list[Path], tmp_path: Path
) -> None:
    """Of sampled tokens, a greedy drafter's are not all accepted. The drafter has taken half of the
    KV cache of a server without."""
    base, out = tmp_path / "base.toml", tmp_path / "out.toml"
    base.write_text(
        f"[fleet]\ninstances = 1\nkv_tokens = {servers.KV_TOKENS}\n"
        "[cost]\nstep_s = 1e-3\nweights_s = 1e-3\ntoken_s = 1e-5\n"
    )
    arguments = ["calibrate", urls[0], "--minutes", "0.05"]
    assert main([*arguments, "--base", str(base), "--out", str(out)]) == 0
    found = load_scenario(str(out)).speculation
    assert found is not None
    assert (found.tokens, found.schedule, found.kv_share) == (DRAFTS, "always", 0.5)
    assert 0.1 < found.acceptance <= 1
