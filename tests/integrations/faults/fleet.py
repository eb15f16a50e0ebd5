"""A gateway in front of simulated servers with faults, all over sockets, and impatient."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from rollout_sched import journal
from rollout_sched.core.model.events import Event, InstanceLost, RequestFailed
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.live.settings import Settings
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.engine import FIRST_LABEL, EngineSettings, Fault
from rollout_sched.simulators.fake_instance.server import EngineName, FakeServer
from tests.simulators.fake_instance.served import SPEC, Client

#: Patience that makes each fault show within a second.
SETTINGS = Settings(
    poll_s=0.05,
    control_timeout_s=2.0,
    update_timeout_s=2.0,
    misses=2,
    stall_s=0.5,
    forgotten_s=0.2,
    abort_timeout_s=0.5,
)
GREEDY = {"temperature": 0, "ignore_eos": True}
POLICY = """
[batching]
use = "fully_async"
[freshness]
use = "bounded"
max_staleness = 3
[interruption]
use = "partial"
kv = "recompute"
at_update = "resubmit"
"""


class House:
    """A gateway, its servers, and what they said."""

    def __init__(self, service: Service, servers: list[FakeServer], clients: list[Client]) -> None:
        self.service = service
        self.servers = servers
        self.clients = clients

    @property
    def url(self) -> str:
        return self.service.url

    @property
    def driver(self) -> Any:
        return self.service.live.driver

    @property
    def anomalies(self) -> dict[str, int]:
        return dict(self.driver.pump.scheduler.state.anomalies)

    def name(self, number: int) -> str:
        return f"http://127.0.0.1:{self.clients[number].port}"

    def set_speed(self, speed: float) -> None:
        """Of all servers: so many tokens of a request in a second."""
        for server in self.servers:
            server.engine.instance.clocked.set_speed(speed)

    def strike(self, number: int, fault: str, **settings: Any) -> None:
        self.servers[number].switchboard.set(Fault(fault, **settings))  # type: ignore[arg-type]

    async def until(self, joined: int) -> None:
        """So many instances are with us."""
        while len(self.driver.pump.scheduler.state.fleet.instances) != joined:
            await asyncio.sleep(0.01)

    async def until_streamed(self, number: int) -> None:
        """Something of what a server makes has reached the gateway."""
        while not any(
            running.streamed for running in self.driver.front.attempts.on(self.name(number))
        ):
            await asyncio.sleep(0.002)


@asynccontextmanager
async def house(
    folder: Path,
    count: int = 2,
    *,
    policy: str = POLICY,
    settings: Settings = SETTINGS,
    stream_every: int = 0,
    prompts_per_step: int = 4,
    speed: float = 1000.0,
    spec: Any = SPEC,
    labels: Sequence[str] = (),
    start_version: int | Literal["auto"] = 0,
    dialect: EngineName = "vllm",
    as_vllm: Literal["0.32", "0.23"] = "0.32",
    **more: Any,
) -> AsyncIterator[House]:
    """At the usual speed a token takes a millisecond. The text tells which version made it.
    `labels` are those that the first servers are started with."""
    (folder / "policy.toml").write_text(policy)
    async with AsyncExitStack() as stack:
        servers, clients = [], []
        for number in range(count):
            engine = EngineSettings(
                spec,
                speed=speed,
                seed=number,
                stream_interval=4,
                versioned_text=True,
                weight_version=labels[number] if number < len(labels) else FIRST_LABEL,
                as_vllm=as_vllm,
            )
            server = FakeServer(engine, dialect=dialect)
            port = await server.start("127.0.0.1", 0)
            stack.push_async_callback(server.close)
            session = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
            clients.append(Client(port, await stack.enter_async_context(session)))
            servers.append(server)
        options = Options(
            policy=str(folder / "policy.toml"),
            instances=[f"http://127.0.0.1:{client.port}" for client in clients],
            port=0,
            prompts_per_step=prompts_per_step,
            start_version=start_version,
            stream_every=stream_every,
            journal=folder / "journal",
            grace_s=0.1,
            **more,
        )
        service = Service(options, lambda line: None, settings=settings)
        # An instance that failed rests until a poll has looked at it; a second is long here.
        service.live.driver.pump.scheduler.parts.backoff.first_s = 2 * settings.poll_s
        try:
            await service.open()
            yield House(service, servers, clients)
        finally:
            await service.close()
        service.live.driver.pump.scheduler.check_invariants()
        assert service.live.driver.broken is None


def events(folder: Path) -> list[Event]:
    """What the journal holds."""
    _, entries = journal.read(folder / "journal")
    return [entry.event for entry in entries]


def reasons(folder: Path) -> list[str]:
    """Why attempts failed and instances were lost, by the journal."""
    return [e.reason for e in events(folder) if isinstance(e, RequestFailed | InstanceLost)]


def response(prompt: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """The greedy response to a prompt, if (version, tokens) made it."""
    return text.tokens(text.name(text.read(prompt)), 0, spans)


def logprobs(prompt: Sequence[int], tokens: int) -> list[float]:
    return text.logprobs(text.name(text.read(prompt)), 0, tokens)


async def answered(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> tuple[list[int], list[tuple[int, int]], list[Any]]:
    """Token ids, (version, tokens) of each segment, and the choices, of a call that ends well."""
    async with session.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        said = await answer.read()
    if body.get("stream"):
        *events, done = said.removesuffix(b"\n\n").split(b"\n\n")
        assert done == b"data: [DONE]"
        answers = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    else:
        answers = [msgspec.json.decode(said)]
    choices = [choice for each in answers for choice in each["choices"]]
    (segments,) = [each["rollout_sched"]["segments"] for each in answers if "rollout_sched" in each]
    spans = [(span["version"], span["end"] - span["start"]) for span in segments]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert segments[-1]["end"] == len(ids)
    return ids, spans, choices
