"""The metrics page is what Prometheus reads, and what the documentation says."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rollout_sched.client import RolloutScheduler
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import InstanceReported, Woke
from rollout_sched.integrations.gateway import families as families_page
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway
from rollout_sched.integrations.gateway.control_plane.prometheus import metrics_of
from rollout_sched.integrations.gateway.families import MetricsPage
from rollout_sched.live.trainer.samples import Mismatch, TokenMismatch
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.gateway.scripted import completion
from tests.live.scripted import until
from tests.metrics.told import sample

DOC = Path(__file__).resolve().parents[4] / "docs/observability.md"
OURS = "rollout_sched_"


async def page_of(gateway: Gateway) -> tuple[str, str]:
    """A new page of metrics, and its content type."""
    page, content_type = await MetricsPage(partial(metrics_of, gateway)).text()
    return page.decode(), content_type


async def families(gateway: Gateway) -> dict[str, Metric]:
    """By the name under which a query finds them."""
    page, content_type = await page_of(gateway)
    assert content_type.startswith("text/plain; version=0.0.4")
    read = text_string_to_metric_families(page)
    return {_queried(family): family for family in read if family.name.startswith(OURS)}


def _queried(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def values(family: Metric) -> dict[tuple[str, ...], float]:
    """By the labels' values, in the order of the labels."""
    return {tuple(one.labels.values()): one.value for one in family.samples}


def documented() -> dict[str, tuple[str, str]]:
    """Type and help by name, as the table says."""
    row = re.compile(r"\| `(rollout_sched_\w+)` \| (\w+) \|[^|]*\| (.*) \|")
    found = (row.fullmatch(line) for line in DOC.read_text().splitlines())
    return {each[1]: (each[2], each[3]) for each in found if each}


async def test_the_documentation_has_what_is_exposed(tmp_path: Path) -> None:
    async with House(Upstream(), journal=tmp_path / "journal") as house:
        exposed = await families(house.service.gateway)
    assert {
        name: (family.type, family.documentation) for name, family in exposed.items()
    } == documented()


async def test_labels_are_those_of_the_documentation(tmp_path: Path) -> None:
    named = re.compile(r"\| `(rollout_sched_\w+)` \| \w+ \|([^|]*)\|")
    rows = (named.match(line) for line in DOC.read_text().splitlines())
    said = {each[1]: set(re.findall(r"`(\w+)`", each[2])) for each in rows if each}
    async with House(Upstream(), journal=tmp_path / "journal") as house:
        exposed = await families(house.service.gateway)
    for name, family in exposed.items():
        shown = {label for one in family.samples for label in one.labels} - {"le"}
        assert shown <= said[name], name
        assert not shown & {"instance", "job"}, "these are Prometheus's own"


async def test_buckets_are_cumulative() -> None:
    async with House() as house:
        pump = house.driver.pump
        samples = tuple(sample("g/0", staleness=age) for age in (0, 2, 99))
        for observe in pump.observers:
            observe(0.0, Woke(), [Deliver(0, 0, samples)])
        family = (await families(house.service.gateway))["rollout_sched_staleness_versions"]
    buckets = {one.labels["le"]: one.value for one in family.samples if "le" in one.labels}
    assert (buckets["0.0"], buckets["1.0"], buckets["2.0"], buckets["+Inf"]) == (1, 1, 2, 3)
    rest = {one.name.removeprefix(family.name): one.value for one in family.samples}
    assert (rest["_sum"], rest["_count"]) == (101, 3)


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
async def test_names_come_back_as_they_are(name: str) -> None:
    async with House() as house:
        gateway = house.service.gateway
        gateway.figures.counters.reports[name] = InstanceReported(name, 0, 0, 0.0)
        page, _ = await page_of(gateway)
    lines = [line for line in page.split("\n") if "_instance_" in line]
    told = [line for line in lines if not line.startswith("#")]
    assert {
        _unescaped(re.findall(r'url="((?:\\.|[^"\\])*)"', line)[0])
        for line in told
        if 'url="' in line
    } == {name}


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


async def test_an_ended_journal_is_exposed(tmp_path: Path) -> None:
    async with House() as house:
        assert "rollout_sched_journal_broken" not in await families(house.service.gateway)
    async with House(journal=tmp_path / "journal") as house:
        gateway = house.service.gateway
        assert values((await families(gateway))["rollout_sched_journal_broken"]) == {(): 0}
        assert gateway.journal is not None
        gateway.journal.broken = "No space left on device"
        assert values((await families(gateway))["rollout_sched_journal_broken"]) == {(): 1}
        _, state = await house.ask("GET", "/admin/state")
        assert state["journal"]["broken"] == "No space left on device"


async def test_moved_sessions_and_anomalies_are_exposed() -> None:
    async with House() as house:
        scheduler = house.driver.pump.scheduler
        scheduler.state.anomalies["late"] += 2
        for name, instance in (("a", "x"), ("a", "y"), ("b", "y")):
            scheduler.state.sessions.sent(name, instance)
        exposed = await families(house.service.gateway)
        assert values(exposed["rollout_sched_sessions"]) == {(): 2}
        assert values(exposed["rollout_sched_session_moves_total"]) == {(): 1}
        assert values(exposed["rollout_sched_anomalies_total"]) == {("late",): 2}
        _, state = await house.ask("GET", "/admin/state")
        assert state["sessions"] == {"known": 2, "moves": 1}


BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 9}


async def test_calls_by_status_and_plane(house, instance) -> None:
    """What is of a client's making is told apart from what is ours."""
    instance.answers["/v1/completions"] = (200, completion([5, 6]))

    async def ask(**changes: Any) -> int:
        async with house.session.post("/v1/completions", json={**BODY, **changes}) as said:
            await said.read()
            return said.status

    assert await ask() == 200
    assert await ask(max_tokens="many") == 400
    instance.answers["/v1/completions"] = (422, {"error": "no"})
    assert await ask() == 422
    assert (await house.ask("GET", "/version"))[0] == 200
    assert (await house.ask("GET", "/admin/instances/nobody"))[0] == 404
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(house.service.url.rpartition(":")[2])
    )
    writer.write(b"not HTTP\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()
    gateway = house.service.gateway
    exposed = await families(gateway)
    counted = {
        (one.labels["plane"], one.labels["code"]): one.value
        for one in exposed["rollout_sched_http_responses_total"].samples
    }
    assert counted == {
        ("data", "200"): 1,
        ("data", "400"): 1,
        ("data", "422"): 1,
        ("control", "200"): 1,
        ("control", "404"): 1,
        ("connection", "400"): 1,
    }
    failed = values(exposed["rollout_sched_failed_attempts_total"])
    assert failed == {("request",): 1, ("instance",): 0, ("unclear",): 0}


async def test_a_client_that_leaves_is_a_499(house, instance) -> None:
    instance.stream = asyncio.Queue()
    asking = asyncio.create_task(house.session.post("/v1/completions", json=BODY))
    await until(lambda: instance.asked)
    asking.cancel()
    responses = house.service.data_plane.calls.responses
    await until(lambda: responses.by_status == {499: 1})


async def test_times_of_a_client_s_request() -> None:
    instance = Upstream()
    instance.answers["/v1/completions"] = (200, completion([5, 6]))
    async with House(instance) as house:
        async with house.session.post("/v1/completions", json=BODY) as said:
            assert said.status == 200
        exposed = await families(house.service.gateway)
    assert count(exposed["rollout_sched_request_duration_seconds"].samples) == 1
    waits = exposed["rollout_sched_queue_wait_seconds"].samples
    assert count(one for one in waits if one.labels["source"] == "client") == 1
    tokens = exposed["rollout_sched_response_tokens"].samples
    of_clients = [one for one in tokens if one.labels["source"] == "client"]
    assert sum(one.value for one in of_clients if one.name.endswith("_sum")) == 2


def count(samples: Iterable[Any]) -> float:
    return sum(one.value for one in samples if one.name.endswith("_count"))


async def test_what_a_trainer_compares_is_exposed_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def compared(k3: float) -> Mismatch:
        own, older = (TokenMismatch(version, 64, 100, k3, 3.0, 0.25) for version in (7, 5))
        return Mismatch(7, [own, replace(older, k3=9.0)])

    async with (
        House(Upstream()) as house,
        RolloutScheduler.connect(house.service.url) as rollouts,
    ):
        for k3 in (0.001, 0.02, 0.03, 0.001, 0.04):
            await rollouts.report_mismatch(compared(k3))
        exposed = await families(house.service.gateway)
        state = await rollouts.state()
        refused, _ = await house.ask("POST", "/rollout/v1/mismatch", {"version": 7, "kinds": [{}]})
    assert values(exposed["rollout_sched_mismatch_k3"]) == {("0", "64"): 0.04, ("2", "64"): 9.0}
    assert values(exposed["rollout_sched_mismatch_tokens"])["0", "64"] == 100.0
    assert state["mismatch"]["kinds"][0]["clipped"] == 0.25
    assert refused == 400
    assert [one.args[1] for one in caplog.records if "log-probs" in one.msg] == [0.02, 0.04]


async def test_a_scraper_that_speaks_openmetrics_gets_it(house) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with house.session.get("/metrics", headers=accept) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")


async def test_nothing_that_others_say_is_a_label(house, instance) -> None:
    """Labels are instances' URLs, statuses of HTTP and names of our own."""
    for number in range(100):
        instance.answers[f"/v1/odd{number}"] = 300 + number, {"error": f"odd{number}"}
        await house.ask("POST", f"/v1/odd{number}", {"model": f"odd{number}"})
        body = {"prompt": f"odd{number}", "session_id": f"odd{number}", "user": f"odd{number}"}
        instance.answers["/v1/completions"] = 400 + number, {"error": {"message": f"odd{number}"}}
        await house.ask("POST", "/v1/completions", body, X_Request_Id=f"odd{number}")
    found: dict[str, set[str]] = {}
    for family in (await families(house.service.gateway)).values():
        for one in family.samples:
            for label, value in one.labels.items():
                found.setdefault(label, set()).add(value)
    assert found.pop("url") == {instance.name}
    assert all(re.fullmatch("[1-9][0-9]{2}", code) for code in found.pop("code"))
    assert not [value for values in found.values() for value in values if "odd" in value]
    assert all(len(values) < 64 for values in found.values())


async def test_scrapes_of_one_second_get_the_same_page(house) -> None:
    """However many strangers scrape, it is put together once, and encoded by one thread."""

    async def scraped(accept: str = "") -> bytes:
        async with house.session.get("/metrics", headers={"Accept": accept}) as response:
            return await response.read()

    first = await scraped()
    house.service.gateway.figures.counters.attempts += 1
    assert set(await asyncio.gather(*(scraped() for _ in range(20)))) == {first}
    assert b"rollout_sched_attempts_total 1.0" in await scraped("application/openmetrics-text")
    await asyncio.sleep(families_page.KEPT_S)
    assert b"rollout_sched_attempts_total 1.0" in await scraped()


async def test_a_page_that_failed_is_not_kept(house, monkeypatch: pytest.MonkeyPatch) -> None:
    page = MetricsPage(partial(metrics_of, house.service.gateway))
    with monkeypatch.context() as patched:
        patched.setattr(families_page, "choose_encoder", lambda accept: (lambda _: 1 / 0, "text"))
        with pytest.raises(ZeroDivisionError):
            await page.text()
    monkeypatch.setattr(families_page, "choose_encoder", lambda accept: (lambda _: b"x", "text"))
    assert await page.text() == (b"x", "text")


@pytest.mark.real_time
async def test_the_gateway_goes_on_while_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes tens of milliseconds of a thousand instances."""
    went_on = threading.Event()

    def encode(registry: CollectorRegistry) -> bytes:
        assert went_on.wait(60)
        return b"".join(family.name.encode() for family in registry.collect())

    monkeypatch.setattr(families_page, "choose_encoder", lambda accept: (encode, "text/plain"))
    async with House() as house:
        page = asyncio.ensure_future(page_of(house.service.gateway))
        await asyncio.sleep(0)
        went_on.set()
        assert "rollout_sched_requests" in (await page)[0]
