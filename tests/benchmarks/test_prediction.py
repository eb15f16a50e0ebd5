"""The way of `make bench-prediction`, in virtual time: without noise, it predicts right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import prediction
from benchmarks.prediction import Lived, figures, predicted, prompts, trace_of, world
from benchmarks.prediction_table import errors
from rollout_sched.calibration.calibration import Calibration, Calibrator
from rollout_sched.inspection.recording import Recording
from rollout_sched.live.ports import InstanceClient, OnTokens, Order, Output
from rollout_sched.simulators.fake_instance.instance import RealtimeInstance
from tests import virtual_loop
from tests.calibration.virtual import LIMITS, SPEC

pytestmark = pytest.mark.usefixtures("files_are_written_at_once")

#: So that "tight" preempts.
TIGHT = msgspec.structs.replace(SPEC, kv_blocks=320, max_num_seqs=prediction.SLOTS)
RELOAD_S = 0.05


class Lengths:
    """As the real ones: as asked for, or ended by a token id that comes up by chance."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._drawn: dict[int, int] = {}

    def __call__(self, order: Order, response: Any) -> int:
        if order.sampling.get("ignore_eos"):
            return SPEC.max_model_len
        share = len(order.sampling["stop_token_ids"]) / 2000
        drawn = 1 + int(self._rng.expovariate(share))
        return self._drawn.setdefault(response.name, drawn)


async def load(client: InstanceClient, version: int) -> None:
    await asyncio.sleep(RELOAD_S)


def lived_through(
    workload: str,
    policy: str,
    record: Path,
    before: Callable[[RealtimeInstance], RealtimeInstance] = lambda server: server,
) -> tuple[Lived, Calibration]:
    """A run in virtual time, and the calibration before it; `before`: what stands before the
    engine."""

    async def scene() -> Calibration:
        server = before(RealtimeInstance("fake", TIGHT, Lengths()))
        calibrator = Calibrator([server], LIMITS, seed=1, report=lambda *_: None)
        found = await calibrator.run(30)
        asked = prompts(prediction.WORKLOADS[workload], 0)
        await prediction.run([server], policy, asked, load, record)
        return msgspec.structs.replace(found, reload_s=RELOAD_S)

    found = virtual_loop.run(scene())
    recording = Recording(record)
    return Lived(workload, policy, figures(recording), trace_of(recording)), found


@pytest.mark.parametrize("policy", prediction.POLICIES)
@pytest.mark.parametrize("workload", ["short", "tight"])
def test_a_calibration_predicts_the_runs(policy: str, workload: str, tmp_path: Path) -> None:
    lived, found = lived_through(workload, policy, tmp_path / "lived.jsonl")
    cells = predicted([lived], world(found, found.fit.cost))
    assert (lived.measured.preemptions > 0) == (workload == "tight")
    _, worst = errors(cells)
    assert worst < 0.001
    ((pair,),) = [cell.pairs for cell in cells]
    assert pair.predicted.preemptions == lived.measured.preemptions


def front_end(server: RealtimeInstance) -> RealtimeInstance:
    """Which takes requests in and writes answers one after the other, beside the engine: vLLM's API
    server, with the times that it takes on a CPU."""
    generate, works = server.generate, asyncio.Lock()

    async def passed_on(order: Order, on_tokens: OnTokens | None = None) -> Output:
        async with works:
            await asyncio.sleep(1e-3)
        output = await generate(order, on_tokens)
        async with works:
            await asyncio.sleep(0.5e-3 + 20e-6 * len(output.token_ids))
        return output

    server.generate = passed_on  # type: ignore[method-assign]
    return server


@pytest.mark.parametrize("workload", prediction.WORKLOADS)
def test_front_end_time_misleads_little(workload: str, tmp_path: Path) -> None:
    """Under the policy that has requests come and go one by one, which is the worst for it."""
    lived, found = lived_through(workload, "areal", tmp_path / "lived.jsonl", front_end)
    cells = predicted([lived], world(found, found.fit.cost))
    _, worst = errors(cells)
    assert worst < 0.025


def test_no_two_repetitions_ask_the_same() -> None:
    work = prediction.WORKLOADS["short"]
    first, second = prompts(work, 0), prompts(work, 1)
    assert {len(prompt.prompt_ids) for prompt in first} == {work.prompt}
    assert not {tuple(p.prompt_ids) for p in first} & {tuple(p.prompt_ids) for p in second}
