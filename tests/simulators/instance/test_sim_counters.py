"""What an instance counts, by hand."""

from __future__ import annotations

from rollout_sched.simulators.instance.sim_instance import SimInstance
from tests.simulators.instance.by_hand import follow, instance, request


def test_a_prompt_found_in_the_cache_is_counted_as_such() -> None:
    one = instance(kv_blocks=50)
    assert isinstance(one, SimInstance)
    for number in (1, 2):
        one.submit(request(number, context=10, new=3, shared_tokens=10), 10.0 * number)
        follow(one)
    gauges = one.gauges()
    assert gauges.generated_tokens == 6
    assert gauges.prefill_tokens + gauges.cached_tokens == 20
    assert gauges.cached_tokens == 8  # whole blocks of 4, and one token is always computed
    assert gauges.reprefilled_tokens == gauges.preemptions == 0
