"""What may be here at once."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.gateway.data_plane.reply import Limits
from tests.integrations.gateway.scripted import Instance, completion
from tests.integrations.gateway.test_data_plane import BODY, Stage, run


@pytest.mark.parametrize(
    ("limits", "body", "status", "says"),
    [
        (Limits(samples=2), {**BODY, "n": 3}, 400, "the limit per call is 2"),
        (Limits(requests=2), {**BODY, "n": 3}, 400, "the limit per call is 2"),
        (Limits(body_bytes=10), BODY, 413, "the limit for all bodies is 10"),
    ],
)
def test_what_could_never_fit_is_refused_for_ever(
    limits: Limits, body: object, status: int, says: str
) -> None:
    async def scene() -> None:
        async with Stage(Instance(), data_plane={"limits": limits}) as stage:
            call = stage.call(body)
            assert says in (await call.json())["error"]["message"]
            assert call.status == status
            assert b"retry-after" not in call.answer_headers
            stage.settled()

    run(scene())


def test_what_does_not_fit_now_is_told_when_to_come_back() -> None:
    async def scene() -> None:
        instance = Instance()
        limits = Limits(requests=1, retry_after_s=7)
        async with Stage(instance, data_plane={"limits": limits}) as stage:
            first, second = stage.call(), stage.call()
            assert (second.status, second.answer_headers[b"retry-after"]) == (503, b"7")
            await instance.answer(0, completion([4]))
            await first.json()
            assert stage.call().status == 0
            await instance.answer(1, completion([4]))

    run(scene())
