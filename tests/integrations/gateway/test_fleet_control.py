"""One server's calls, for a fleet: whom they reach, and what a client of one server is told."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.integrations.gateway.control_plane.fanout import shipped
from tests.integrations.gateway.house import House, Upstream, run
from tests.integrations.gateway.test_hostile import ask_raw, request
from tests.live.scripted import until

A, B = "http://a:1", "http://b:1"


def two() -> tuple[Upstream, Upstream]:
    return Upstream(A), Upstream(B)


def paths_of(instance: Upstream) -> list[str]:
    return [asked["path"] for asked in instance.asked]


def test_every_call_of_the_table_reaches_whom_its_row_says() -> None:
    async def scene() -> None:
        for (method, path), rule in shipped().calls.items():
            first, second = two()
            async with House(first, second) as house:
                status, _ = await house.ask(method, path, {} if method == "POST" else None)
                asked = len(paths_of(first)) + len(paths_of(second))
                expected = {"all": 2, "rewrite": 2, "one": 1, "refuse": 0}[rule.to]
                assert (status, asked) == (409 if rule.to == "refuse" else 200, expected), path

    run(scene(), 120)


def test_what_would_change_one_of_many_is_refused_with_the_remedy() -> None:
    async def scene() -> None:
        first, second = two()
        async with House(first, second) as house:
            for path, status in (("/mx_prepare_initial_refit", 404), ("/scale_elastic_ep", 409)):
                told, answer = await house.ask("POST", path, {})
                assert told == status
                assert f"/v1/rl/workers/ID/engine{path}" in answer["error"]["message"]
            assert not first.asked
            assert not second.asked
        async with House(Upstream(A)) as house:
            assert (await house.ask("POST", "/scale_elastic_ep", {}))[0] == 200

    run(scene())


def test_who_knows_of_one_server_is_told_what_one_would_say() -> None:
    async def scene() -> None:
        first, second = two()
        first.answers["/pause"] = second.answers["/pause"] = (200, {"status": "paused"})
        first.answers["/is_paused"] = (200, {"is_paused": True, "x": 1})
        second.answers["/is_paused"] = (200, {"is_paused": False, "x": 2})
        first.answers["/get_world_size"] = (200, {"world_size": 4})
        second.answers["/get_world_size"] = (200, {"world_size": 2})
        async with House(first, second) as house:
            for method, path, shared in (
                ("POST", "/pause", {"status": "paused"}),
                ("GET", "/is_paused", {"is_paused": False}),
                ("GET", "/get_world_size", {"world_size": 6}),
            ):
                status, answer = await house.ask(method, path)
                assert status == 200
                assert answer["succeeded"] == 2
                assert {field: answer[field] for field in shared} == shared
                assert "x" not in answer

    run(scene())


@pytest.mark.parametrize("said", [b"plain", {"world_size": "many"}, {"world_size": True}, {}, [1]])
def test_what_does_not_add_up_is_left_out(said: Any) -> None:
    async def scene() -> None:
        first, second = two()
        first.answers["/get_world_size"] = (200, {"world_size": 4})
        second.answers["/get_world_size"] = (200, said)
        async with House(first, second) as house:
            status, answer = await house.ask("GET", "/get_world_size")
            assert status == 200
            assert "world_size" not in answer

    run(scene())


def test_a_failure_of_some_is_one_that_may_be_sent_again() -> None:
    """Not 207, which SkyRL and prime-rl take for success."""

    async def scene() -> None:
        first, second = two()
        second.answers["/reset_prefix_cache"] = (500, {"error": "no"})
        async with House(first, second) as house:
            status, answer = await house.ask("POST", "/reset_prefix_cache", {})
            assert (status, answer["error"]["code"]) == (502, 502)
            assert f"{B} (500)" in answer["error"]["message"]
            assert (answer["succeeded"], answer["failed"][0]["url"]) == (1, B)

    run(scene())


@pytest.mark.parametrize(("said", "told"), [(404, 404), (422, 422), (500, 502)])
def test_what_all_refuse_alike_is_the_caller_s_fault(said: int, told: int) -> None:
    async def scene() -> None:
        first, second = two()
        for instance in (first, second):
            instance.answers["/start_profile"] = (said, {"error": "no"})
        async with House(first, second) as house:
            status, answer = await house.ask("POST", "/start_profile", {})
            assert (status, answer["error"]["code"]) == (told, told)

    run(scene())


def test_who_is_away_is_asked_where_it_matters_and_fails_nobody() -> None:
    async def scene() -> None:
        first, second = two()
        async with House(first, second) as house:
            second.dead = True
            await until(lambda: not house.driver.supervisors[B].joined, 30)
            second.answers["/resume"] = (500, {"error": "no"})
            status, answer = await house.ask("POST", "/resume")
            assert (status, answer["failed"], answer["away"][0]["url"]) == (200, [], B)
            assert (await house.ask("POST", "/reset_prefix_cache"))[0] == 200
            assert paths_of(second) == ["/resume"]
            assert (await house.ask("GET", "/get_world_size"))[1]["total"] == 1

    run(scene())


def test_who_was_held_and_went_away_goes_on_when_it_is_back() -> None:
    async def scene() -> None:
        first, second = two()
        async with House(first, second, live={"poll_s": 0.05}) as house:
            supervisor = house.driver.supervisors[B]
            await house.ask("POST", "/pause?mode=keep")
            second.dead = True
            await until(lambda: not supervisor.joined, 30)
            second.answers["/resume"] = (500, {})
            assert (await house.ask("POST", "/resume"))[0] == 200
            second.calls.clear()
            second.dead = False
            await until(lambda: supervisor.joined, 30)
            assert "pause" not in [call[0] for call in second.calls if isinstance(call, tuple)]
            assert not supervisor.pauses.held
            assert house.driver.versions.gate(B) == ""

    run(scene(), 90)


def test_where_nobody_has_joined() -> None:
    async def scene() -> None:
        async with House() as house:
            for path in ("/pause", "/update_weights", "/reset_prefix_cache"):
                status, answer = await house.ask("POST", path, {})
                assert (status, answer["error"]["message"]) == (503, "no instance has joined")
        only = Upstream(A)
        async with House(only) as house:
            only.dead = True
            await until(lambda: not house.driver.supervisors[A].joined, 30)
            await only.go_down()
            assert (await house.ask("POST", "/pause"))[0] == 502
            assert (await house.ask("POST", "/start_weight_update"))[0] == 503

    run(scene())


def test_who_is_held_gets_nothing_new_until_it_is_released() -> None:
    async def scene() -> None:
        async with House(*two()) as house:
            versions = house.driver.versions
            await house.ask("POST", "/pause?mode=keep&clear_cache=false")
            assert all(versions.gate(name) for name in (A, B))
            await house.ask("POST", "/resume")
            assert not any(versions.gate(name) for name in (A, B))

    run(scene())


def test_who_is_awake_in_part_stands_still() -> None:
    """As with SkyRL's servers on the trainer's GPUs: weights first, then the KV cache."""

    async def scene() -> None:
        first, second = two()
        async with House(first, second) as house:
            await house.ask("POST", "/sleep?level=1")
            for instance in (first, second):
                instance.answers["/wake_up?tags=weights"] = (200, {"status": "sleeping"})
                instance.answers["/wake_up?tags=kv_cache"] = (200, {"status": "awake"})
            for tag, still in (("weights", True), ("kv_cache", False)):
                assert (await house.ask("POST", f"/wake_up?tags={tag}"))[0] == 200
                for name in (A, B):
                    assert bool(house.driver.versions.gate(name)) is still
                    assert house.driver.supervisors[name].pauses.held is still

    run(scene())


def test_the_clients_key_is_enough_for_skyrl_s_own_generate() -> None:
    async def scene() -> None:
        first, second = two()
        async with House(first, second) as house:
            browser = {"Origin": "http://somewhere"}  # which no administrator's call may show
            assert (await house.ask("POST", "/skyrl/v1/generate", {}, **browser))[0] == 200
            assert (await house.ask("POST", "/skyrl/v1/load_lora_adapter", {}, **browser))[0] == 403
            assert len(first.asked) + len(second.asked) == 1

    run(scene())


def test_a_path_in_other_letters_is_the_same_row() -> None:
    async def scene() -> None:
        async with House(*two()) as house:
            assert (await ask_raw(house, request("POST", "/p%61use")))[0] == 200
            assert all(paths_of(each) == ["/pause"] for each in house.instances.values())  # type: ignore[arg-type]
            assert (await ask_raw(house, request("DELETE", "/pause")))[0] == 405

    run(scene())
