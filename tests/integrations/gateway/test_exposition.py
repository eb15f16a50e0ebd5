"""The metrics page is what Prometheus reads."""

from __future__ import annotations

import re

from rollout_sched.core.actions import Deliver
from rollout_sched.core.events import Woke
from rollout_sched.integrations.gateway.exposition import exposition
from tests.integrations.gateway.house import House, Upstream, run
from tests.integrations.gateway.test_counters import sample

_SAMPLE = re.compile(r'[a-z_]+(\{[a-z_]+="(\\.|[^"\\])*"(,[a-z_]+="(\\.|[^"\\])*")*\})? [0-9.e+-]+')


def test_every_line_is_a_comment_or_a_sample_of_the_family_above() -> None:
    async def scene() -> None:
        async with House(Upstream('http://a:1/"x"\\')) as house:
            gateway = house.service.gateway
            gateway.scheduler.anomalies["late"] += 2
            text = exposition(gateway)
        family = ""
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                family, kind = line.split()[2:]
                assert kind in ("counter", "gauge", "histogram")
                assert (kind == "counter") == family.endswith("_total")
            elif not line.startswith("# HELP "):
                assert _SAMPLE.fullmatch(line), line
                assert line.startswith(family)
        assert 'rollout_sched_anomalies_total{kind="late"} 2' in text
        assert r'instance="http://a:1/\"x\"\\"' in text

    run(scene())


def test_buckets_are_cumulative() -> None:
    async def scene() -> None:
        async with House() as house:
            samples = (sample(1, 0), sample(1, 2), sample(1, 99))
            gateway = house.service.gateway
            gateway.counters.observe(0.0, Woke(), [Deliver(0, 0, samples)])
            text = exposition(gateway)
        name = "rollout_sched_staleness_versions"
        buckets = dict(re.findall(name + r'_bucket\{le="([^"]+)"\} (\d+)', text))
        assert (buckets["0"], buckets["1"], buckets["2"], buckets["+Inf"]) == ("1", "1", "2", "3")
        assert f"\n{name}_sum 101\n{name}_count 3\n" in text

    run(scene())
