"""Load pushed by engines."""

from __future__ import annotations

from types import SimpleNamespace

from rollout_sched.integrations.vllm.in_process import EngineGauges
from rollout_sched.live.ports import Gauges


def state(running, waiting, usage, drafts=None):
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=usage,
        spec_decoding_stats=drafts,
    )


def step(computed, cached, made):
    prompts = SimpleNamespace(computed=computed, local_cache_hit=cached)
    return SimpleNamespace(
        prompt_token_stats=prompts, num_preempted_reqs=1, num_generation_tokens=made
    )


def test_gauges_are_empty_at_first():
    assert EngineGauges().now() == Gauges(0, 0, 0.0)


def test_states_replace_and_counters_add_up():
    gauges = EngineGauges()
    drafts = SimpleNamespace(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=6)
    gauges.record(state(9, 9, 0.9, drafts), step(100, 10, 5))
    gauges.record(state(2, 3, 0.25), step(50, 20, 7))
    gauges.record(state(4, 0, 0.75), None, 1)
    gauges.record(None, step(1, 2, 3), 1)
    assert gauges.now() == Gauges(
        running=6,
        waiting=5,
        kv_usage=0.5,
        preemptions=3,
        prefill_tokens=151,
        cached_tokens=32,
        generated_tokens=15,
        drafts=2,
        drafted_tokens=8,
        accepted_tokens=6,
    )
