"""The same job for a trainer in lock step, for ours and for the replay."""

from __future__ import annotations

from itertools import chain

import msgspec
import pytest

from benchmarks.live.steps_job import MOST_OVER, job_of, tokens_of
from rollout_sched.simulators.replay.scenario import load_scenario
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn

SCENARIO = load_scenario("benchmarks/live/few_slots.toml")


def trace(groups, size=2):
    samples = {
        f"g{number}": [
            SampleRecord(f"g{number}", index, 10, (Turn(100 * number + index + 1),))
            for index in range(size)
        ]
        for number in range(groups)
    }
    return Trace("small", samples, max_response_tokens=4_096)


def job(number=0, groups=8):
    return job_of(
        trace(groups), SCENARIO, number, steps=2, prompts_per_step=2, samples=2, speed=50.0
    )


def test_each_job_takes_the_next_prompts():
    assert list(job(0).trace.groups) == ["g0", "g1", "g2", "g3"]
    assert list(job(1).trace.groups) == ["g4", "g5", "g6", "g7"]


def test_a_trace_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="small has 3 groups of 2 samples, 4 are needed"):
        job(groups=3)


def test_both_trainers_ask_for_the_same():
    both = job(1)
    prompts = list(both.prompts("a"))
    in_lock_step = list(both.steps("a", "m"))
    assert [len(step) for step in in_lock_step] == [4, 4]
    bodies = [msgspec.json.decode(ask.body) for ask in chain(*in_lock_step)]
    ours = [
        (prompt.prompt_ids, prompt.max_tokens, prompt.sampling_of(index)["extra_args"])
        for prompt in prompts
        for index in range(prompt.samples)
    ]
    theirs = [(body["prompt"], body["max_tokens"], body["vllm_xargs"]) for body in bodies]
    assert ours == theirs


def test_over_sampled_lengths_are_those_of_the_replay():
    prompt = next(job().prompts("a"))
    told = [one["extra_args"]["fake_response_tokens"] for one in prompt.each]
    assert told == [job().workload.length("g0", index) for index in range(MOST_OVER * 2)]


def test_what_is_trained_on_takes_as_long_as_in_the_scenario():
    tokens = tokens_of(chain(*job().trace.groups.values()))
    assert tokens == 8 * 10 + sum(
        100 * number + index + 1 for number in range(4) for index in (0, 1)
    )
    trainer = SCENARIO.trainer
    assert job().training_s(tokens) == trainer.fixed_s + trainer.seconds_per_token * tokens


def test_the_replay_trains_all_of_it_and_sees_as_much_as_the_driver():
    assert job().scenario.visibility.poll_s == 50.0
    run = job().replayed("round_robin_sync")
    assert run.summary.steps == 2
    assert run.samples_lost == 0
