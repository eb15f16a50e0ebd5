"""/rollout/v1: the trainer session over HTTP, and nothing lost with a connection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_sched.client import RolloutScheduler
from rollout_sched.integrations.gateway.control_plane.trainer_api import AT_ONCE
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.live.ports import RequestRejected
from rollout_sched.live.trainer.samples import Batch, Prompt
from rollout_sched.store.errors import StoreFull
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.live.scripted import until


def prompt(uid: str, **other: Any) -> dict[str, Any]:
    fields = {"uid": uid, "prompt_ids": [1, 2], "samples": 1, "max_tokens": 9, **other}
    return msgspec.to_builtins(Prompt(**fields))


async def test_from_prompts_to_batches(house, instance) -> None:
    prompts = [prompt("a", sampling={"logprobs": 0}, extra={"row": 7}), prompt("b")]
    submitted = await house.ask("POST", "/rollout/v1/groups", prompts)
    assert submitted == (200, {"accepted": 2, "delivered": []})
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


async def test_a_batch_comes_again_until_it_is_acknowledged(house, instance) -> None:
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
    await until(lambda: not house.driver.pump.scheduler.parts.requests)
    _, second = await house.ask("POST", "/rollout/v1/batches/next", body)
    assert second["number"] == 1
    assert (await house.ask("POST", "/rollout/v1/batches/next", body)) == (200, second)


@pytest.fixture
def streamed(tmp_path: Path) -> str:
    path = tmp_path / "streamed.toml"
    path.write_text('[batching]\nuse = "sync"\npart_prompts = 1\n')
    return str(path)


async def test_parts_come_again_until_they_are_acknowledged(streamed: str) -> None:
    """And none of them twice after that, whatever becomes of the connections."""
    instance = Upstream()
    async with House(instance, policy=streamed, prompts_per_step=3) as house:

        async def ask(**body: Any) -> Any:
            path = "/rollout/v1/batches/next"
            status, said = await house.ask("POST", path, {"parts": True, **body})
            return said if status == 200 else status

        async def whole(groups: int) -> None:
            run = house.driver.view.run
            await until(lambda: run.delivered == groups)

        await house.ask("POST", "/rollout/v1/groups", [prompt(uid) for uid in "abc"])
        assert await ask(timeout_s=0) == 202
        # One who hangs up while it waits takes nothing along.
        asking = asyncio.create_task(ask())
        await instance.order(2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await instance.answer(0, [5])
        await whole(1)
        first = await ask()
        assert first == await ask()
        assert (first["number"], first["part"], first["last"]) == (0, 0, False)
        got = {"ack": 0, "part": 0}
        assert await ask(**got, timeout_s=0) == 202
        await instance.answer(1, [6])
        await whole(2)
        second = await ask(**got)
        assert second == await ask(**got)
        assert [sample["uid"] for sample in second["samples"]] == ["b"]
        publish = {"version": 1, "applied": True}
        status, said = await house.ask("POST", "/rollout/v1/weights", publish)
        assert status == 400
        assert "take its parts up to the last" in said["error"]["message"]
        await instance.answer(2, [7])
        await whole(3)
        last = await ask(ack=0, part=1)
        assert (last["part"], last["last"]) == (2, True)
        assert (await house.ask("POST", "/rollout/v1/weights", publish))[0] < 300
        for part in (2, 2, None):
            assert await ask(ack=0, part=part, timeout_s=0) == 202


async def test_parts_are_sent_only_on_request(streamed: str) -> None:
    instance = Upstream()
    async with House(instance, policy=streamed, prompts_per_step=2) as house:
        await house.ask("POST", "/rollout/v1/groups", [prompt("a"), prompt("b")])
        asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
        await instance.answer(0, [5])
        await until(lambda: house.driver.view.run.complete)
        assert house.driver.view.run.in_batch == 0
        await instance.answer(1, [6])
        _, batch = await asking
        assert (len(batch["samples"]), batch["part"], batch["last"]) == (2, 0, True)


async def test_one_trainer_that_asks_twice_at_once_gets_the_same(house, instance) -> None:
    await house.ask("POST", "/rollout/v1/groups", [prompt("a")])
    asking = [asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next")) for _ in range(2)]
    await instance.answer(0, [5])
    first, second = await asyncio.gather(*asking)
    assert first == second


@pytest.mark.scene(max_samples=3)
async def test_a_submission_that_is_sent_again_is_answered_like_the_first(house, instance) -> None:
    body = [prompt("a"), prompt("b", samples=2)]
    for _ in range(3):
        answer = await house.ask("POST", "/rollout/v1/groups", body)
        assert answer == (200, {"accepted": 2, "delivered": []})
    assert house.service.gateway.trainer.submissions.open_samples == 3
    asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
    await instance.answer(0, [5])
    await asking
    assert (await house.ask("POST", "/rollout/v1/groups", body))[0] == 200
    assert house.service.gateway.trainer.submissions.open_samples == 2, (
        "a is in a batch that may be lost"
    )
    await house.ask("POST", "/rollout/v1/batches/next", {"ack": 0, "timeout_s": 0})
    answer = await house.ask("POST", "/rollout/v1/groups", [*body, prompt("c")])
    assert answer == (200, {"accepted": 3, "delivered": ["a"]}), "a takes no place"
    status, said = await house.ask("POST", "/rollout/v1/groups", [prompt("a", max_tokens=5)])
    assert (status, "'a' was already delivered" in str(said)) == (409, True)


async def test_a_full_disk_is_a_507(tmp_path: Path) -> None:
    """And what is under way is finished and handed out."""
    instance = Upstream()
    async with House(instance, store=tmp_path / "s") as house:
        writer = house.service.live.records.stored.keeper.writer
        await house.ask("POST", "/rollout/v1/groups", [prompt("a")])
        asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
        await instance.order()
        writer.store.disk.room = lambda folder: 1  # from now on
        await house.service.live.trainer.durable()
        await until(lambda: writer.full, 30)
        status, said = await house.ask("POST", "/rollout/v1/groups", [prompt("b")])
        assert status == 507
        assert "no new prompts are taken until" in said["error"]["message"]
        assert "0 groups before it" in said["error"]["message"]
        async with RolloutScheduler.connect(house.service.url) as rollouts:
            with pytest.raises(StoreFull, match="the disk is full"):
                await rollouts.submit([Prompt("b", [1, 2], 1, 9)])
        await instance.answer(0, [5])
        status, batch = await asking
        assert (status, batch["samples"][0]["uid"]) == (200, "a")
        del writer.store.disk.room
        await until(lambda: not writer.full, 30)
        assert (await house.ask("POST", "/rollout/v1/groups", [prompt("b")]))[0] == 200


class TestSeveralTrainers:
    PATH = "/rollout/v1/batches/next"

    @pytest.mark.scene(live={"lease_s": 1000.0})
    async def test_each_trainer_takes_separate_batches(self, house, instance) -> None:
        await house.ask("POST", "/rollout/v1/groups", [prompt("a"), prompt("b")])
        asking = [
            asyncio.create_task(house.ask("POST", self.PATH, {"trainer": name}))
            for name in ("t1", "t2")
        ]
        for number in range(2):
            await instance.answer(number, [5])
        batches = {batch["number"]: status for status, batch in await asyncio.gather(*asking)}
        assert batches == {0: 200, 1: 200}
        _, state = await house.ask("GET", "/rollout/v1/state")
        leases = {one["trainer"]: one["state"] for one in state["leases"]}
        assert leases == {"t1": "leased", "t2": "leased"}
        assert state["lease_s"] == 1000.0

    @pytest.mark.scene(live={"lease_s": 0.05})
    async def test_a_trainer_without_lease_learns_the_new_holder(self, house, instance) -> None:
        await house.ask("POST", "/rollout/v1/groups", [prompt("a")])
        asking = asyncio.create_task(house.ask("POST", self.PATH, {"trainer": "t1"}))
        await instance.answer(0, [5])
        _, batch = await asking
        status, same = await house.ask("POST", self.PATH, {"trainer": "t2"})
        assert (status, same) == (200, batch)
        late = {"trainer": "t1", "ack": 0, "timeout_s": 0}
        for _ in range(2):
            status, said = await house.ask("POST", self.PATH, late)
            assert status == 410
            assert "trainer 't2' has it now" in said["error"]["message"]
        beat = await house.ask("POST", "/rollout/v1/batches/renew", {"trainer": "t2"})
        assert beat == (200, {"batch": 0})
        beat = await house.ask("POST", "/rollout/v1/batches/renew", {"trainer": "t1"})
        assert beat == (200, {"batch": None})
        arrived = {**late, "trainer": "t2"}
        assert (await house.ask("POST", self.PATH, arrived))[0] == 202
        status, said = await house.ask("POST", self.PATH, late)
        assert status == 410
        assert "trainer 't2' has acknowledged it" in said["error"]["message"]

    @pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", 7])
    async def test_a_name_that_is_none_is_refused(self, name: Any, house) -> None:
        for path in (self.PATH, "/rollout/v1/batches/renew"):
            status, said = await house.ask("POST", path, {"trainer": name})
            assert status == 400
            assert "$.trainer" in said["error"]["message"]


async def test_msgpack_both_ways(house, instance) -> None:
    headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    body = msgspec.msgpack.encode([Prompt("a", [1], 1, 9)])
    async with house.session.post("/rollout/v1/groups", data=body, headers=headers) as response:
        assert msgspec.msgpack.decode(await response.read()) == {"accepted": 1, "delivered": []}
    asking = asyncio.create_task(
        house.session.post("/rollout/v1/batches/next", data=b"\x80", headers=headers)
    )
    await instance.answer(0, [5])
    batch = msgspec.msgpack.decode(await (await asking).read(), type=Batch)
    assert batch.samples[0].response_ids == [5]


async def test_malformed_submissions_name_the_field(house) -> None:
    for body, says in (
        ([{**prompt("a"), "max_tokens": 0}], "$[0].max_tokens"),
        ([{**prompt("a"), "colour": 1}], "colour"),
        ({}, "array"),
    ):
        status, said = await house.ask("POST", "/rollout/v1/groups", body)
        assert status == 400
        assert says in said["error"]["message"]
    body = [prompt("a"), prompt("a", max_tokens=5)]
    status, said = await house.ask("POST", "/rollout/v1/groups", body)
    assert status == 409
    assert "'a' was already submitted with other values of max_tokens" in str(said)
    assert "1 groups before it" in said["error"]["message"]
    _, state = await house.ask("GET", "/rollout/v1/state")
    assert state["groups"]["fresh"] == 1


async def test_a_waiting_trainer_is_answered_at_shutdown(house) -> None:
    await house.ask("POST", "/rollout/v1/groups", [prompt("a")])
    asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
    await until(lambda: house.driver.pump.scheduler.state.progress.trainer_waiting)
    house.service.gateway.trainer.close()
    assert (await asking)[0] == 202


@pytest.mark.parametrize(
    ("submissions", "status"),
    [
        ([[("a", 11)]], 413),
        ([[("a", 65_536)]], 413),
        ([[("a", 100_000_000)]], 400),
        ([[("a", 5), ("b", 6)]], 413),
        ([[("a", 4), ("b", 6)]], 200),
        ([[("a", 6)], [("b", 5)]], 503),
        ([[("a", 6)], [("b", 4)]], 200),
    ],
)
async def test_samples_are_counted_before_they_are_created(
    submissions: list[list[tuple[str, int]]], status: int
) -> None:
    async with House(max_samples=10) as house:
        fresh = 0
        for prompts in submissions:
            body = [prompt(uid, samples=samples) for uid, samples in prompts]
            told, said = await house.ask("POST", "/rollout/v1/groups", body)
            fresh += len(prompts) if told == 200 else 0
        assert told == status
        assert house.driver.pump.scheduler.state.progress.fresh == fresh
        if status == 400:
            assert "<= 65536" in said["error"]["message"]
        elif status != 200:
            assert "the limit is 10" in said["error"]["message"]
            assert "--max-samples" in said["error"]["message"]


@pytest.mark.scene(max_samples=2)
async def test_delivered_and_failed_groups_free_their_places(house, instance) -> None:
    trainer = house.service.gateway.trainer
    for number in range(3):
        body = [prompt(f"{number}", samples=2)]
        assert (await house.ask("POST", "/rollout/v1/groups", body))[0] == 200
        assert (await house.ask("POST", "/rollout/v1/groups", [prompt("x")]))[0] == 503
        assert trainer.submissions.open_samples == 2
        ack = {"ack": number - 1}
        asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next", ack))
        for sample in range(2):
            await instance.answer(2 * number + sample, [5])
        assert (await asking)[1]["number"] == number
        assert trainer.submissions.open_samples == 0
    assert (await house.ask("POST", "/rollout/v1/groups", [prompt("f")]))[0] == 200
    ack = {"ack": 2, "timeout_s": 0}
    assert (await house.ask("POST", "/rollout/v1/batches/next", ack))[0] == 202
    await instance.fail(6, RequestRejected("no"))
    await until(lambda: not trainer.submissions.open_samples)


def test_a_hundred_thousand_groups_of_sixteen_may_wait() -> None:
    assert Options(policy="", instances=[]).max_samples >= 100_000 * 16


async def test_two_submissions_at_once_count_together() -> None:
    async with House(max_samples=1500) as house:
        asked = [[prompt(f"{who}{n}") for n in range(1000)] for who in "ab"]
        answers = await asyncio.gather(
            *(house.ask("POST", "/rollout/v1/groups", body) for body in asked)
        )
        assert sorted(status for status, _ in answers) == [200, 503]
        assert house.service.gateway.trainer.submissions.open_samples == 1000
        rest = [prompt(f"c{n}") for n in range(500)]
        assert (await house.ask("POST", "/rollout/v1/groups", rest))[0] == 200


@pytest.mark.real_time
async def test_a_long_submission_leaves_others_their_turn() -> None:
    async with House() as house:
        progress = house.driver.pump.scheduler.state.progress
        asking = asyncio.create_task(
            house.ask("POST", "/rollout/v1/groups", [prompt(f"{n}") for n in range(1000)])
        )
        before, most = 0, 0
        while not asking.done():
            await asyncio.sleep(0)
            before, most = progress.fresh, max(most, progress.fresh - before)
        assert progress.fresh == 1000
        assert most <= AT_ONCE


async def test_every_answer_says_which_run_of_the_scheduler_gives_it(house) -> None:
    said = set()
    for method, path in (
        ("GET", "/rollout/v1/state"),
        ("POST", "/rollout/v1/groups/close"),
        ("POST", "/rollout/v1/no/such/path"),
    ):
        url = house.service.url + path
        async with house.session.request(method, url) as response:
            said.add(response.headers["Rollout-Epoch"])
    assert said == {house.driver.epoch}
    _, state = await house.ask("GET", "/rollout/v1/state")
    assert state["epoch"] == house.driver.epoch
    async with house.session.get(house.service.url + "/health") as response:
        assert "Rollout-Epoch" not in response.headers


async def test_an_acknowledgement_of_an_earlier_run_is_refused(house, instance) -> None:
    await house.ask("POST", "/rollout/v1/groups", [prompt("a")])
    asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
    await instance.answer(0, [5])
    _, batch = await asking
    asked = house.session.post(
        house.service.url + "/rollout/v1/batches/next",
        json={"ack": 0, "timeout_s": 600},
        headers={"Rollout-Epoch": "an earlier one"},
    )
    async with asked as response:
        assert response.status == 202
    assert (await house.ask("POST", "/rollout/v1/batches/next")) == (200, batch)


async def test_unknown_groups_are_reported(house, instance) -> None:
    await house.ask("POST", "/rollout/v1/groups", [prompt(uid) for uid in "abc"])
    asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
    await instance.answer(0, [5])
    await asking

    async def unknown() -> list[str]:
        path = "/rollout/v1/groups/unknown"
        _, said = await house.ask("POST", path, ["d", "c", "b", "a"])
        uids: list[str] = said["unknown"]
        return uids

    assert await unknown() == ["d"]
    await house.ask("POST", "/rollout/v1/batches/next", {"ack": 0, "timeout_s": 0})
    assert await unknown() == ["d"]
    await instance.fail(1, RequestRejected("no such sampling parameter"))
    await until(lambda: len(house.driver.pump.scheduler.state.groups) == 1)
    assert await unknown() == ["d"]  # the trainer is yet to hear of b
