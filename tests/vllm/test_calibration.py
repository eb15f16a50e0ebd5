"""Calibration of real vLLM: over HTTP, in process, and what a replay then says of a run."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prediction
from rollout_sched.calibration.bursts import Burst, steps_of
from rollout_sched.calibration.calibration import StepCalibrator
from rollout_sched.calibration.prober import IDS, SAMPLING
from rollout_sched.cli import main
from rollout_sched.integrations.vllm.in_process import SteppedEngine
from rollout_sched.simulators.replay.scenario import load_scenario
from tests.vllm import servers


@pytest.fixture
def stepped(engine: Any) -> Iterator[SteppedEngine]:
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    yield SteppedEngine(engine)
    scheduler.schedule = schedule


@pytest.mark.parametrize("burst", [Burst(3, 40, 5), Burst(1, 300, 1), Burst(16, 20, 8, waves=3)])
def test_the_steps_of_a_burst_are_those_that_the_engine_makes(
    stepped: SteppedEngine, burst: Burst
) -> None:
    """So the constants can be found from how long a whole burst took."""
    rng = random.Random(str(burst))
    prompts = [rng.choices(IDS, k=burst.prompt) for _ in range(burst.requests)]
    made = stepped.burst(prompts, burst.lengths, SAMPLING)
    limit = stepped.limits.max_num_batched_tokens
    assert limit is not None
    wanted = steps_of(burst, stepped.slots, limit)
    assert len(made) == sum(run.number for run in wanted)
    assert sum(step.sequences for step in made) == sum(r.number * r.sequences for r in wanted)
    assert sum(step.prefill_tokens for step in made) == burst.requests * burst.prompt
    for name in ("context", "attention", "requests"):
        told = sum(getattr(step, name) for step in made)
        assert told == pytest.approx(sum(getattr(run, name) for run in wanted)), name


def test_an_engine_in_process(stepped: SteppedEngine) -> None:
    found = StepCalibrator(stepped, 1, lambda *_: None).run(6, "tiny")
    cost = found.fit.cost
    assert 1e-4 < cost.step_s + cost.weights_s < 0.2
    assert cost.token_s > 0
    assert (found.room.slots, found.limits.block_size) == (stepped.slots, 32)


def test_a_running_server(models: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    with servers.serving(
        models[0], tmp_path, "--enable-scale-out", dev_mode=True, core=0
    ) as server:
        url = server.wait()
        arguments = ["calibrate", url, "--minutes", "0.3", "--out", str(out)]
        assert main([*arguments, "--weights", str(models[0])]) == 0
    found = load_scenario(str(out))
    fleet, cost = found.fleet, found.cost
    assert (fleet.kv_tokens, fleet.block_size) == (servers.KV_TOKENS, servers.BLOCK_SIZE)
    assert (fleet.max_num_seqs, fleet.max_model_len) == (
        servers.MAX_NUM_SEQS,
        servers.MAX_MODEL_LEN,
    )
    assert fleet.prefix_caching
    assert 0 < found.weights.seconds < 30
    assert 1e-4 < cost.step_s + cost.weights_s < 0.2
    assert "Not determined: max_num_batched_tokens" not in out.read_text()


def test_what_a_replay_says_beforehand(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it is right is for `make bench-prediction` to say, on a machine nobody else uses."""
    arguments = ["--repetitions", "1", "--calibrate-s", "10", "--workload", "short"]
    assert prediction.main([*arguments, "--policy", "round_robin_sync"]) in (0, 1)
    row = re.search(r"\| short, `round_robin_sync` \| \S+ s \S+ \| (\S+)", capsys.readouterr().out)
    assert row is not None
    assert 0.3 < float(row[1]) < 3
