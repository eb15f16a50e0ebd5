"""Whatever an instance does wrong: nothing lost, nothing twice, every response whole, and said."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
from aiohttp import web

from rollout_sched.client import Prompt, Reload, RolloutScheduler, Sample
from rollout_sched.core.model.events import InstanceJoined, InstanceLost
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.live.instances.membership import MembershipState
from rollout_sched.simulators.fake_instance import server
from tests.integrations.faults.fleet import (
    GREEDY,
    SETTINGS,
    House,
    answered,
    events,
    house,
    logprobs,
    reasons,
    response,
)
from tests.integrations.gateway.test_fleet import checkpoint

NO_POLLS = msgspec.structs.replace(SETTINGS, poll_s=1000.0)
PROMPTS = [[n + 1, n + 2, n + 3] for n in range(12)]
TOKENS = 30


class Way(NamedTuple):
    """How the responses are asked for, and whether tokens come before the end."""

    ask: Callable[[House], Awaitable[None]]
    streams: bool


async def as_trainer(the: House) -> None:
    """Whole groups of two from the trainer session."""
    async with RolloutScheduler.connect(the.url) as rollouts:
        await rollouts.submit(prompts())
        await rollouts.close_submissions()
        assert_whole([s async for batch in rollouts.batches() for s in batch.samples])


def prompts() -> list[Prompt]:
    sampling = {**GREEDY, "logprobs": 0}
    return [Prompt(f"g{n}", ids, 2, TOKENS + n, sampling) for n, ids in enumerate(PROMPTS)]


def assert_whole(samples: list[Sample]) -> None:
    assert sorted((s.uid, s.index) for s in samples) == sorted(
        (f"g{n}", index) for n in range(len(PROMPTS)) for index in range(2)
    )
    for sample in samples:
        prompt = PROMPTS[int(sample.uid[1:])]
        spans = [(span.version, span.end - span.start) for span in sample.segments]
        assert sample.response_ids == response(prompt, spans)
        assert len(sample.response_ids) == TOKENS + int(sample.uid[1:])
        assert sample.rollout_log_probs == logprobs(prompt, len(sample.response_ids))


def as_clients(path: str, stream: bool) -> Callable[[House], Awaitable[None]]:
    """Everybody at once, each with a call of its own."""

    async def ask(the: House) -> None:
        async with aiohttp.ClientSession(the.url) as session:
            await asyncio.gather(*(one(session, number) for number in range(len(PROMPTS))))

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        prompt, tokens = PROMPTS[number], TOKENS + number
        sampling = {**GREEDY, "max_tokens": tokens}
        if path == "/v1/completions":
            body = {"prompt": prompt, **sampling, "return_token_ids": True, "stream": stream}
        else:
            body = {"token_ids": prompt, "sampling_params": sampling, "stream": stream}
        ids, spans, choices = await answered(session, path, body)
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
        assert ids == response(prompt, spans)
        assert len(ids) == tokens

    return ask


WAYS = {
    "trainer": Way(as_trainer, False),
    "trainer, streamed": Way(as_trainer, True),
    "generate": Way(as_clients("/inference/v1/generate", False), False),
    "completions, streamed": Way(as_clients("/v1/completions", True), True),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("silent", "never answered"),
        ("garbage", "is not valid|(no|a) finish_reason"),
        ("reset", "closed before the answer|closed in the middle"),
        ("cut", "closed in the middle|closed before the answer"),
        ("error_500", "500: .*as ordered"),
        ("error_503", "503: .*as ordered"),
        ("restart", "restarted|failed|closed"),
    ],
)
async def test_a_fault_of_some_answers(tmp_path: Path, way: Way, fault: str, says: str) -> None:
    async with house(tmp_path, stream_every=5 * way.streams) as the:
        the.strike(0, fault, times=1 if fault == "restart" else 3, seconds=0.2)
        await way.ask(the)
        assert not the.driver.pump.scheduler.parts.requests
        assert the.anomalies == {}
    assert any(re.search(says, reason) for reason in reasons(tmp_path)), reasons(tmp_path)


async def test_answers_that_come_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with house(tmp_path) as the:
        the.strike(0, "twice", times=5)
        await WAYS["trainer"].ask(the)
        assert not the.driver.pump.scheduler.parts.requests
    assert "data without a request" in caplog.text
    # A second answer that came after the next request of its connection was recognized by its id.
    assert all("with the answer to" in reason for reason in reasons(tmp_path))


@pytest.mark.parametrize("named", ["not at all", "every second"])
@pytest.mark.parametrize("name", WAYS)
async def test_second_answers_that_come_when_they_do_most_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, named: str
) -> None:
    """Each answer comes once more as the first answer to the next call on its connection; without
    an id it was taken for the answer to that call."""
    sent: dict[Any, bytes] = {}
    serve, send = server.serve, server._Answering._send

    async def late(request: web.Request, dialect: Any, *rest: Any) -> web.StreamResponse:
        if body := sent.pop(request.transport, b""):
            repeat(request, body)
        nameless = named == "not at all" or len(sent) % 2
        answer = await serve(request, Nameless(dialect) if nameless else dialect, *rest)
        if isinstance(answer, web.Response):
            sent[request.transport] = answer.body
        return answer

    async def kept(self: Any, response: Any, events: Any) -> None:
        sent[self.request.transport] = sent.get(self.request.transport, b"")
        sent[self.request.transport] += b"".join(map(server._event, events))
        await send(self, response, events)

    repeat = server._repeat
    monkeypatch.setattr(server, "serve", late)
    monkeypatch.setattr(server._Answering, "_send", kept)
    async with house(tmp_path, stream_every=5 * WAYS[name].streams) as the:
        for _ in range(1 if "trainer" in name else 3):
            await WAYS[name].ask(the)
    assert named != "not at all" or not reasons(tmp_path)


class Nameless:
    """A dialect of a server that numbers its answers itself."""

    def __init__(self, dialect: Any) -> None:
        self._dialect = dialect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialect, name)

    def parse(self, *told: Any) -> Any:
        asked = self._dialect.parse(*told)
        asked.id = "cmpl-5"
        return asked


async def test_streams_that_say_everything_twice(tmp_path: Path) -> None:
    """Found out by the first that is said again: none of it may be gone on from."""
    async with house(tmp_path, stream_every=5) as the:
        the.strike(0, "twice", times=5)
        await WAYS["trainer, streamed"].ask(the)
    said = r"it reports (\d+) tokens made, but has sent \1 and these"
    assert any(re.search(said, reason) for reason in reasons(tmp_path))


async def test_a_stream_that_says_everything_twice_ends_in_an_error(tmp_path: Path) -> None:
    """It has the tokens already, so nothing can be made good, but never does it look good."""
    async with house(tmp_path, count=1) as the, aiohttp.ClientSession(the.url) as session:
        the.strike(0, "twice", times=1)
        body = {"prompt": PROMPTS[0], **GREEDY, "max_tokens": TOKENS, "stream": True}
        async with session.post("/v1/completions", json=body) as answer:
            said = (await answer.read()).decode()
        assert "[DONE]" not in said
        assert "continued after its finish_reason" in said
    assert any("continued after its finish_reason" in reason for reason in reasons(tmp_path))


@pytest.mark.parametrize("name", WAYS)
async def test_answers_under_anothers_id_are_not_passed_on(tmp_path: Path, name: str) -> None:
    async with house(tmp_path) as the:
        the.strike(0, "another", times=3)
        await WAYS[name].ask(the)
        assert not the.driver.pump.scheduler.parts.requests
        assert the.anomalies == {}
    assert [reason for reason in reasons(tmp_path) if re.search("with the answer to", reason)]


async def test_answers_that_lack_their_last_bytes(tmp_path: Path) -> None:
    async with house(tmp_path) as the:
        the.strike(0, "unfinished", times=3)
        await WAYS["generate"].ask(the)
        assert not the.driver.pump.scheduler.parts.requests
    assert len(reasons(tmp_path)) >= 3


async def test_streams_that_lack_only_their_done_are_whole(tmp_path: Path) -> None:
    """Clients waited for it for ever."""
    async with house(tmp_path) as the:
        the.strike(0, "unfinished")
        the.strike(1, "unfinished")
        await WAYS["completions, streamed"].ask(the)
        assert not the.driver.pump.scheduler.parts.requests
    assert not reasons(tmp_path)


@pytest.mark.parametrize("samples", [1, 2])
async def test_clients_that_set_no_limit_are_answered_when_an_instance_dies(
    tmp_path: Path, samples: int
) -> None:
    """It may have made all its tokens, and then nobody is left to say so."""
    async with house(tmp_path) as the, aiohttp.ClientSession(the.url) as session:
        asked = {"prompt": PROMPTS[0], "max_tokens": None, "stream": True, "n": samples}
        asked["vllm_xargs"] = {"fake_response_tokens": 200}

        async def ask() -> bytes:
            async with session.post("/v1/completions", json=asked) as answer:
                return await answer.read()

        asking = [asyncio.create_task(ask()) for _ in range(8)]
        await the.until_streamed(0)
        await the.servers[0].close()
        for said in await asyncio.gather(*asking):
            assert said.endswith(b"data: [DONE]\n\n") or b'"error"' in said


@pytest.mark.parametrize("name", ["trainer", "trainer, streamed", "generate"])
async def test_answers_of_another_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """They are what its server itself says it does not have: made again, counted, and said once."""
    way = WAYS[name]
    async with house(tmp_path, stream_every=5 * way.streams) as the:
        await loaded(the, tmp_path, 1)
        the.strike(0, "wrong_version", times=5)
        await way.ask(the)
        assert the.driver.versions.contradictions == {"newer": 5}
        assert the.anomalies == {}
    assert caplog.text.count("answers with versions [2], but [1] are known") == 1


async def loaded(the: House, folder: Path, version: int, *, wait: bool = True) -> None:
    checkpoint(folder / f"v{version}")
    async with RolloutScheduler.connect(the.url) as rollouts:
        await rollouts.publish_weights(version, Reload(str(folder / "v{version}")), wait=wait)


async def test_a_slow_instance_is_waited_for(tmp_path: Path, way: Way) -> None:
    async with house(tmp_path, stream_every=5 * way.streams) as the:
        the.strike(0, "slow", seconds=0.1)
        await way.ask(the)
    assert reasons(tmp_path) == []


async def test_an_instance_that_is_too_slow_is_given_up(tmp_path: Path, way: Way) -> None:
    async with house(tmp_path, stream_every=5 * way.streams) as the:
        the.strike(0, "slow", seconds=60.0, times=3)
        await way.ask(the)
    given_up = reasons(tmp_path)
    assert len(given_up) == 3
    assert all(reason.startswith(NEVER_ANSWERED) for reason in given_up)


async def test_a_request_that_a_busy_instance_forgets_is_retried(tmp_path: Path, way: Way) -> None:
    """It never comes to rest, so that nobody could tell by that."""
    async with house(tmp_path, count=1, stream_every=5 * way.streams, speed=100.0) as the:
        long = asyncio.create_task(_one_long(the))
        await the.clients[0].until_running(1)
        the.strike(0, "silent", times=1)
        await asyncio.wait_for(way.ask(the), 10)
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
    assert any(reason.startswith(NEVER_ANSWERED) for reason in reasons(tmp_path))


async def _one_long(the: House) -> None:
    async with aiohttp.ClientSession(the.url) as session:
        body = {"token_ids": [9, 9], "sampling_params": ENDLESS}
        async with session.post("/inference/v1/generate", json=body) as answer:
            await answer.read()


ENDLESS = {**GREEDY, "max_tokens": 3900}


async def test_a_second_gateway_leaves_alone_what_the_first_has_paused(tmp_path: Path) -> None:
    async with house(tmp_path, count=1) as the:
        engine = the.servers[0].engine
        await engine.pause("keep", clear_cache=False)
        options = Options(policy=str(tmp_path / "policy.toml"), instances=[the.name(0)], port=0)
        second = Service(options, lambda line: None, settings=SETTINGS)
        await second.open()
        try:
            supervisor = second.live.driver.supervisors[the.name(0)]
            await asyncio.sleep(0.2)  # some polls
            assert not supervisor.joined
            assert "paused, and not by us" in supervisor.reason
            assert engine.instance.paused
            await engine.resume()
            while not supervisor.joined:
                await asyncio.sleep(0.01)
        finally:
            await second.close()


async def test_a_hold_is_shown_while_the_instance_is_away_and_kept_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with (
        house(tmp_path, count=1) as the,
        aiohttp.ClientSession(the.url) as session,
    ):
        async with session.post("/admin/pause", json={}) as answer:
            assert answer.status == 200
        restarting = asyncio.create_task(the.servers[0].restart(0.3))
        await the.until(0)
        async with session.get("/admin/instances") as answer:
            (told,) = await answer.json()
        assert (told["status"], told["held"]) == ("away", True)
        await restarting
        await the.until(1)
        assert the.servers[0].engine.instance.paused
        async with session.post("/admin/resume", json={}) as answer:
            assert answer.status == 200
        await WAYS["generate"].ask(the)


NEVER_ANSWERED = "given up: never answered"


async def test_weights_that_cannot_be_loaded(tmp_path: Path, way: Way) -> None:
    """Such an instance is unfit: it gets nothing until a restart, and what it had moves on."""
    async with house(tmp_path, stream_every=5 * way.streams, speed=100.0) as the:
        asking = asyncio.create_task(way.ask(the))
        await the.clients[0].until_generated(20)
        the.strike(0, "update_500", times=1)
        await loaded(the, tmp_path, 1)
        await asking
        assert len(the.driver.pump.scheduler.state.fleet.instances) == 1
        supervisor = the.driver.supervisors[the.name(0)]
        assert supervisor.membership.state is MembershipState.UNFIT
        assert "the weights could not be loaded, as ordered" in supervisor.reason
        await asyncio.sleep(0.2)  # some polls
        assert len(the.driver.pump.scheduler.state.fleet.instances) == 1
        await the.servers[0].restart(0.0)
        await the.until(2)
        assert the.anomalies == {}
    assert any("/collective_rpc answered 500" in reason for reason in reasons(tmp_path))


@pytest.mark.parametrize("busy", [True, False])
async def test_a_restarted_instance_gets_its_weights_before_it_serves(
    tmp_path: Path, way: Way, busy: bool
) -> None:
    """It comes back with its first weights and an empty cache, so fast that no poll misses it."""
    async with house(tmp_path, stream_every=5 * way.streams, speed=100.0) as the:
        await loaded(the, tmp_path, 1)
        asking = asyncio.create_task(way.ask(the)) if busy else None
        if busy:
            await the.clients[0].until_generated(20)
        await the.servers[0].restart(0.0)
        await (asking or asyncio.sleep(0))
        while not the.service.gateway.figures.counters.gone["lost"]:
            await asyncio.sleep(0.01)
        await the.until(2)
        await way.ask(the) if asking is None else None
        while the.servers[0].engine.weights.label != "1":
            await asyncio.sleep(0.01)
        assert the.anomalies == {}
    assert "it was restarted" in reasons(tmp_path)[-1]


@pytest.mark.parametrize("name", ["trainer", "trainer, streamed", "generate"])
async def test_answers_of_a_restarted_instance_are_refused_before_any_poll(
    tmp_path: Path, name: str
) -> None:
    """It answers with the weights of its start, which were taken for those it had before."""
    way = WAYS[name]
    async with house(tmp_path, stream_every=5 * way.streams, settings=NO_POLLS) as the:
        the.driver.pump.scheduler.parts.backoff.first_s = 0.01
        await loaded(the, tmp_path, 1)
        await the.servers[0].restart(0.0)
        await way.ask(the)
        assert not the.driver.pump.scheduler.parts.requests
    assert any("'default'" in reason for reason in reasons(tmp_path))
    assert "it was restarted" in reasons(tmp_path)


async def test_a_stream_of_a_restarted_instance_ends_in_an_error(tmp_path: Path) -> None:
    async with (
        house(tmp_path, count=1, settings=NO_POLLS) as the,
        aiohttp.ClientSession(the.url) as session,
    ):
        await loaded(the, tmp_path, 1)
        await the.servers[0].restart(0.0)
        body = {"token_ids": PROMPTS[0], "sampling_params": {**GREEDY, "max_tokens": TOKENS}}
        async with session.post("/inference/v1/generate", json={**body, "stream": True}) as answer:
            said = (await answer.read()).decode()
        assert "[DONE]" not in said
        assert "restarted" in said


async def test_requests_of_a_dead_instance_go_on_elsewhere(tmp_path: Path, way: Way) -> None:
    async with house(tmp_path, stream_every=5 * way.streams, speed=100.0) as the:
        asking = asyncio.create_task(way.ask(the))
        await the.clients[0].until_generated(20)
        if way.streams:
            await the.until_streamed(0)
        await the.servers[0].close()
        await asking
        await the.until(1)
        assert the.anomalies == {}
        resumed = the.service.gateway.figures.counters.resumed
        assert bool(resumed) == way.streams  # what was streamed has been gone on from
    joined = [e for e in events(tmp_path) if isinstance(e, InstanceJoined)]
    lost = [e for e in events(tmp_path) if isinstance(e, InstanceLost)]
    assert (len(joined), len(lost)) == (2, 1)


async def test_requests_of_a_stuck_instance_go_on_elsewhere(tmp_path: Path, way: Way) -> None:
    """Its requests run, it answers every poll, and nothing comes."""
    async with house(tmp_path, stream_every=5 * way.streams, speed=100.0) as the:
        asking = asyncio.create_task(way.ask(the))
        await the.clients[0].until_generated(20)
        await the.servers[0].engine.get_stuck()
        await asking
    assert any("no progress" in reason for reason in reasons(tmp_path))


async def test_an_engine_that_dies_behind_its_server(tmp_path: Path, way: Way) -> None:
    """A stream then ends with an error and a [DONE], which is no end of the response."""
    async with house(tmp_path, stream_every=5 * way.streams, speed=100.0) as the:
        asking = asyncio.create_task(way.ask(the))
        await the.clients[0].until_generated(20)
        if way.streams:
            await the.until_streamed(0)
        the.servers[0].engine.weights.tear("as ordered")
        status, _ = await the.clients[0].post(
            "/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}
        )
        assert status == 500
        await asking
        assert the.anomalies == {}
        assert bool(the.service.gateway.figures.counters.resumed) == way.streams
    assert any("EngineCore encountered an issue" in reason for reason in reasons(tmp_path))
