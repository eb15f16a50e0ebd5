"""What the reference tells of a step. That it does what the jumping instance does is in
tests/laws, and that both do what vLLM does in tests/vllm."""

from __future__ import annotations

from rollout_sched.simulators.instance.reference.instance import ReferenceInstance, StepRecord
from tests.simulators.instance.by_hand import follow, instance, request


def test_it_records_what_each_step_decided() -> None:
    one = instance(ReferenceInstance, kv_blocks=8)
    assert isinstance(one, ReferenceInstance)
    one.submit(request(1, context=12, new=16, shared_tokens=12), 0.0)
    one.submit(request(2, context=12, new=16, shared_tokens=12), 0.0)
    follow(one, until=0.5)
    assert one.step_end == 1.0
    # The second finds two of its three blocks; the last is computed again.
    assert one.last_step == StepRecord({1: 12, 2: 4}, [], {1: 0, 2: 8})
    follow(one, until=1.5)
    assert one.last_step == StepRecord({1: 1, 2: 1}, [], {})
    follow(one, until=9.5)
    assert one.last_step == StepRecord({1: 1}, [2], {})
    assert one.running == [1]
