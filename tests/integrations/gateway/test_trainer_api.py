"""/rollout/v1: the trainer's desk over HTTP, and nothing lost with a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from rollout_sched.live.samples import Batch, Prompt
from tests.integrations.gateway.house import House, Upstream, run
from tests.live.scripted import until


def prompt(uid: str, **other: Any) -> dict[str, Any]:
    fields = {"uid": uid, "prompt_ids": [1, 2], "samples": 1, "max_tokens": 9, **other}
    return msgspec.to_builtins(Prompt(**fields))


def test_from_prompts_to_batches() -> None:
    async def scene() -> None:
        instance = Upstream()
        async with House(instance) as house:
            prompts = [prompt("a", sampling={"logprobs": 0}, extra={"row": 7}), prompt("b")]
            submitted = await house.ask("POST", "/rollout/v1/groups", prompts)
            assert submitted == (200, {"accepted": 2})
            assert (await house.ask("POST", "/rollout/v1/groups/close"))[0] == 204
            asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
            await instance.answer(0, [5, 6])
            status, batch = await asking
            assert (status, batch["number"]) == (200, 0)
            (sample,) = batch["samples"]
            assert (sample["uid"], sample["response_ids"]) == ("a", [5, 6])
            assert sample["rollout_log_probs"] == [-0.5, -0.5]
            assert (sample["versions"], sample["extra"]) == ([0, 0], {"row": 7})
            asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next", {"ack": 0}))
            await instance.answer(1, [8])
            assert (await asking)[1]["number"] == 1
            for _ in range(2):
                assert await house.ask("POST", "/rollout/v1/batches/next", {"ack": 1}) == (204, "")

    run(scene())


def test_a_batch_comes_again_until_it_is_acknowledged() -> None:
    async def scene() -> None:
        instance = Upstream()
        async with House(instance) as house:
            await house.ask("POST", "/rollout/v1/groups", [prompt("a"), prompt("b")])
            early = {"timeout_s": 0}
            assert (await house.ask("POST", "/rollout/v1/batches/next", early))[0] == 202
            # One who hangs up while it waits takes nothing along.
            asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
            await instance.order()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await instance.answer(0, [5])
            _, first = await house.ask("POST", "/rollout/v1/batches/next")
            assert (await house.ask("POST", "/rollout/v1/batches/next")) == (200, first)
            stale = {"ack": 99, "timeout_s": 0}
            assert (await house.ask("POST", "/rollout/v1/batches/next", stale)) == (200, first)
            body = {"ack": first["number"], "timeout_s": 0}
            assert (await house.ask("POST", "/rollout/v1/batches/next", body))[0] == 202
            await instance.answer(1, [6])
            # The acknowledgement of the first, sent again, is none of the second.
            await until(lambda: not house.driver.scheduler.requests)
            _, second = await house.ask("POST", "/rollout/v1/batches/next", body)
            assert second["number"] == 1
            assert (await house.ask("POST", "/rollout/v1/batches/next", body)) == (200, second)

    run(scene())


def test_two_who_ask_at_once_get_the_same() -> None:
    async def scene() -> None:
        instance = Upstream()
        async with House(instance) as house:
            await house.ask("POST", "/rollout/v1/groups", [prompt("a")])
            asking = [
                asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next")) for _ in range(2)
            ]
            await instance.answer(0, [5])
            first, second = await asyncio.gather(*asking)
            assert first == second

    run(scene())


def test_msgpack_both_ways() -> None:
    async def scene() -> None:
        instance = Upstream()
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        async with House(instance) as house:
            body = msgspec.msgpack.encode([Prompt("a", [1], 1, 9)])
            async with house.session.post(
                "/rollout/v1/groups", data=body, headers=headers
            ) as response:
                assert msgspec.msgpack.decode(await response.read()) == {"accepted": 1}
            asking = asyncio.create_task(
                house.session.post("/rollout/v1/batches/next", data=b"\x80", headers=headers)
            )
            await instance.answer(0, [5])
            batch = msgspec.msgpack.decode(await (await asking).read(), type=Batch)
            assert batch.samples[0].response_ids == [5]

    run(scene())


def test_what_cannot_be_made_names_the_place() -> None:
    async def scene() -> None:
        async with House(Upstream()) as house:
            for body, says in (
                ([{**prompt("a"), "max_tokens": 0}], "$[0].max_tokens"),
                ([{**prompt("a"), "colour": 1}], "colour"),
                ({}, "array"),
            ):
                status, said = await house.ask("POST", "/rollout/v1/groups", body)
                assert status == 400
                assert says in said["error"]["message"]
            body = [prompt("a"), prompt("a")]
            status, said = await house.ask("POST", "/rollout/v1/groups", body)
            assert status == 409
            assert "'a' is already here" in said["error"]["message"]
            assert "1 groups before it" in said["error"]["message"]
            _, state = await house.ask("GET", "/rollout/v1/state")
            assert state["groups"]["fresh"] == 1

    run(scene())


def test_weights() -> None:
    async def scene() -> None:
        async with House(Upstream()) as house:
            body = {"version": 3, "applied": True}
            assert await house.ask("POST", "/rollout/v1/weights", body) == (202, {"version": 3})
            await until(lambda: house.driver.scheduler.progress.fleet_version == 3)

    run(scene())


def test_who_waits_when_the_gateway_stops_is_sent_away() -> None:
    async def scene() -> None:
        async with House(Upstream()) as house:
            await house.ask("POST", "/rollout/v1/groups", [prompt("a")])
            asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
            await until(lambda: house.driver.scheduler.progress.trainer_waiting)
            await house.service.gateway.handout.close()
            assert (await asking)[0] == 202

    run(scene())
