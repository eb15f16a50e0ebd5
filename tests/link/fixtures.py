"""A host with an instance that a test controls, and with fronts on wires without delay."""

from __future__ import annotations

from itertools import repeat
from typing import Any

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import BatchRequested, GroupSubmitted
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.link.host import Host
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.requests.payloads import PayloadFactory
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.link.wires import Joined
from tests.live.scripted import Scripted

PROMPT = [1, 2, 3]


class Caller(TokenPayload):
    """A client that records what it receives."""

    def __init__(self) -> None:
        super().__init__(PROMPT, {"logprobs": 0}, stream_every=2, responder=self)
        self.heard: list[Any] = []

    def answer(self, sample: DeliveredSample) -> None:
        self.heard.append(sample)

    def fail(self, reason: str, error: Exception | None) -> None:
        self.heard.append((reason, str(error)))


class Stage:
    """One instance, and fronts "f0", "f1", ..."""

    def __init__(self, fronts: int = 1, *, settings: Settings | None = None, **roles: Any) -> None:
        self.settings = settings or Settings(poll_s=1000.0, abort_timeout_s=0.2)
        self.scheduler = make_scheduler(**{"batching": "sync", **roles})
        self.batches: list[tuple[Deliver, list[Any]]] = []
        self.failed: list[tuple[str, str]] = []
        self.driver = Driver(
            self.scheduler,
            settings=self.settings,
            run_id="run",
            on_deliver=lambda action, payloads: self.batches.append((action, payloads)),
            on_group_failed=lambda group, error: self.failed.append((group, str(error))),
        )
        self.host = Host(self.driver)
        self.instance = Scripted()
        self.instances: dict[str, InstanceClient] = {"i0": self.instance}
        self.fronts = [self.join(f"f{number}") for number in range(fronts)]

    def join(self, name: str) -> Joined:
        return Joined(
            self.host,
            name,
            repeat(0.0),
            instances=self.instances,
            make=factory,
            settings=self.settings,
        )

    async def __aenter__(self) -> Stage:
        await self.driver.add_instance(self.instance)
        return self

    async def __aexit__(self, *_: Any) -> None:
        for joined in self.fronts:
            await joined.remote.close()
        await self.driver.close()
        self.scheduler.check_invariants()

    def ask(self, front: int = 0) -> Caller:
        caller = Caller()
        self.request = self.fronts[front].remote.calls.submit(caller, len(PROMPT), 100)
        return caller

    def group(self, name: str = "g", samples: int = 1) -> None:
        submitted = GroupSubmitted(name, samples, len(PROMPT), 100)
        self.host.submit_group(submitted, factory(b""), b"a recipe")
        self.driver.tell(BatchRequested())


def factory(spec: bytes) -> PayloadFactory:
    return lambda index: TokenPayload(PROMPT, {"logprobs": 0}, stream_every=2)
