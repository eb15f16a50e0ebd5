"""vLLM's names of gauges: the simulated server says what the client reads, by these names."""

from __future__ import annotations

from rollout_sched.integrations.vllm.protocol import endpoints as gauges
from tests.integrations.vllm.scripted import METRICS


def test_a_server_of_vllms_was_seen_to_say_all_of_them():
    names = [value for name, value in vars(gauges).items() if name.isupper()]
    assert len(names) == 10
    assert [name for name in names if name not in METRICS] == []
