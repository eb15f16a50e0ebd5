"""The metrics page is what Prometheus reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollout_sched.core.actions import Deliver
from rollout_sched.core.events import Woke
from rollout_sched.integrations.gateway.control_plane.prometheus import prometheus_text
from tests.integrations.gateway.house import House, Upstream, run
from tests.integrations.gateway.test_counters import sample

_SAMPLE = re.compile(r'[a-z_]+(\{[a-z_]+="(\\.|[^"\\])*"(,[a-z_]+="(\\.|[^"\\])*")*\})? [0-9.e+-]+')


def test_every_line_is_a_comment_or_a_sample_of_the_family_above() -> None:
    async def scene() -> None:
        async with House(Upstream('http://a:1/"x"\\')) as house:
            gateway = house.service.gateway
            gateway.driver.pump.scheduler.anomalies["late"] += 2
            text = prometheus_text(gateway)
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
            text = prometheus_text(gateway)
        name = "rollout_sched_staleness_versions"
        buckets = dict(re.findall(name + r'_bucket\{le="([^"]+)"\} (\d+)', text))
        assert (buckets["0"], buckets["1"], buckets["2"], buckets["+Inf"]) == ("1", "1", "2", "3")
        assert f"\n{name}_sum 101\n{name}_count 3\n" in text

    run(scene())


@pytest.mark.parametrize(
    "name",
    [
        "http://a:1",
        'http://a:1/"x"',
        "http://a:1/back\\slash",
        "http://a:1/\\n",
        "http://a:1/line\nend",
        'http://a:1/"} 1\nevil{x="',
        "http://a:1/{}=,",
        "http://a:1/\u2028\r\x85",
    ],
)
def test_names_come_back_as_they_are(name: str) -> None:
    async def scene() -> None:
        async with House() as house:
            gateway = house.service.gateway
            gateway.counters.generated[name] = 7
            text = prometheus_text(gateway)
        lines = [line for line in text.split("\n") if line and not line.startswith("#")]
        assert all(_SAMPLE.fullmatch(line) for line in lines)
        of_instances = [line for line in lines if "_instance_" in line]
        assert {
            _unescaped(re.findall(r'instance="((?:\\.|[^"\\])*)"', line)[0])
            for line in of_instances
        } == {name}

    run(scene())


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


def test_a_journal_that_ended_is_told(tmp_path: Path) -> None:
    async def scene() -> None:
        async with House() as house:
            assert "journal" not in prometheus_text(house.service.gateway)
        async with House(journal=tmp_path / "journal") as house:
            gateway = house.service.gateway
            assert "\nrollout_sched_journal_broken 0\n" in prometheus_text(gateway)
            assert gateway.journal is not None
            gateway.journal.broken = "No space left on device"
            assert "\nrollout_sched_journal_broken 1\n" in prometheus_text(gateway)
            _, state = await house.ask("GET", "/admin/state")
            assert state["journal"]["broken"] == "No space left on device"

    run(scene())


def test_sessions_that_moved_are_told() -> None:
    async def scene() -> None:
        async with House() as house:
            sessions = house.driver.pump.scheduler.sessions
            for name, instance in (("a", "x"), ("a", "y"), ("b", "y")):
                sessions.sent(name, instance)
            text = prometheus_text(house.service.gateway)
            assert "\nrollout_sched_sessions 2\n" in text
            assert "\nrollout_sched_session_moves_total 1\n" in text
            _, state = await house.ask("GET", "/admin/state")
            assert state["sessions"] == {"known": 2, "moves": 1}

    run(scene())
