"""The data plane of a gateway before scripted instances, and the calls that tests make of it."""

from __future__ import annotations

from typing import Any

from rollout_sched.core.scheduler import Scheduler
from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.live.driver import Driver
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.integrations.gateway.scripted import Call, Instance
from tests.live.scripted import until

PROMPT = [1, 2, 3]
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10}
PARTIAL = {"use": "partial", "kv": "recompute", "at_update": "resubmit"}


class Stage:
    """`async with Stage(Instance()) as stage`: the data plane before scripted instances."""

    def __init__(
        self, *instances: Instance, data_plane: dict[str, Any] | None = None, **roles: Any
    ):
        self.instances = instances
        self._options = data_plane or {}
        self._roles = roles
        self.scheduler: Scheduler
        self.driver: Driver
        self.data_plane: DataPlane

    async def __aenter__(self) -> Stage:
        self.scheduler = make_scheduler(**{"batching": "sync", **self._roles})
        self.driver = Driver(self.scheduler, settings=Settings(poll_s=1000.0))
        self.data_plane = DataPlane(
            self.driver, resumable=self.driver.view.keeps_partial, **self._options
        )
        for instance in self.instances:
            await self.driver.add_instance(instance)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.driver.close()
        self.scheduler.check_invariants()

    def call(
        self,
        body: Any = BODY,
        target: str = "/v1/completions",
        *,
        peer: str = "10.0.0.1",
        **headers: str,
    ) -> Call:
        call = Call(target, body, **headers)
        call.peer = peer
        assert self.data_plane.wants(call.method, call.target)
        refusal = self.data_plane.refusal(call.method, call.target, call.fields)
        if refusal is None:
            self.data_plane.handle(call)
        else:
            call.answer(*refusal)
        return call

    async def update(self, version: int, instance: Instance) -> None:
        """New weights, loaded at once; waits until the instance hears of them."""

        async def load(instance: Any, version: int) -> None:
            return None

        self.driver.publish(version, load)
        await until(lambda: instance.calls)

    def settled(self) -> None:
        assert (self.data_plane.calls.open.requests, self.data_plane.calls.open.body_bytes) == (
            0,
            0,
        )
        assert not self.scheduler.parts.requests


def segments(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["rollout_sched"]["segments"]
    return found


def generated(token_ids: list[int], finish: str, version: str) -> dict[str, Any]:
    """An /inference/v1/generate answer as vLLM 0.32 gives it."""
    content = [{"token_id": token, "logprob": -token / 10} for token in token_ids]
    return {
        "request_id": "generate-tokens-1",
        "usage": {"prompt_tokens": 3, "completion_tokens": len(token_ids)},
        "prompt_token_ids": PROMPT,
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "token_ids": token_ids,
                "weight_versions": [{"version": version, "start": 0, "end": len(token_ids)}],
                "logprobs": {"content": content},
            }
        ],
    }
