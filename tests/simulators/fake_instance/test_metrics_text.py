"""/metrics holds what vLLM's holds, in Prometheus' text format."""

from __future__ import annotations

import re

from rollout_sched.live.ports import Gauges
from rollout_sched.simulators.fake_instance.control import render
from rollout_sched.simulators.fake_instance.engine import Engine, EngineSettings
from rollout_sched.simulators.replay import virtual_loop
from tests.simulators.fake_instance.served import SPEC

SAMPLE = re.compile(r'([a-z_:]+)(?:\{((?:[a-z_]+="[^"]*",?)*)\})? ([0-9.e+]+)')


def test_every_gauge_is_there() -> None:
    async def scene() -> None:
        engine = Engine(EngineSettings(SPEC, model="m"))
        lines = render(engine, Gauges(1, 2, 0.5, 3, 40, 60, 0, 70)).splitlines()
        types = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
        values = {}
        for line in lines:
            if not line.startswith("#"):
                match = SAMPLE.fullmatch(line)
                assert match, line
                name, labels, value = match.groups()
                assert types[name] == ("counter" if name.endswith("_total") else "gauge")
                assert name.startswith("process") or 'engine="0",model_name="m"' in labels
                values[name] = values.get(name, 0.0) + float(value)
        assert values["vllm:num_requests_running"] == 1
        assert values["vllm:num_requests_waiting"] == 2
        assert values["vllm:kv_cache_usage_perc"] == 0.5
        assert values["vllm:num_preemptions_total"] == 3
        assert values["vllm:prompt_tokens_by_source_total"] == 100
        assert values["vllm:prefix_cache_hits_total"] == 60
        assert values["vllm:generation_tokens_total"] == 70
        (config,) = [line for line in lines if line.startswith("vllm:cache_config_info")]
        for told in ('block_size="4"', 'num_gpu_blocks="1001"', 'kv_cache_size_tokens="4000"'):
            assert told in config

    virtual_loop.run(scene())
