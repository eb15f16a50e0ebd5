"""One server's calls, for a fleet: whom they reach, and what a client of one server is told."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from rollout_sched.integrations.gateway.control_plane.fanout import shipped
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.gateway.test_hostile import ask_raw, request
from tests.live.scripted import until

A, B = "http://a:1", "http://b:1"


def two() -> tuple[Upstream, Upstream]:
    return Upstream(A), Upstream(B)


def paths_of(instance: Upstream) -> list[str]:
    return [asked["path"] for asked in instance.asked]


async def test_each_call_reaches_the_instances_of_its_row() -> None:
    for (method, path), rule in shipped().calls.items():
        first, second = two()
        async with House(first, second) as house:
            status, _ = await house.ask(method, path, {} if method == "POST" else None)
            asked = len(paths_of(first)) + len(paths_of(second))
            expected = {"all": 2, "rewrite": 2, "one": 1, "refuse": 0}[rule.to]
            assert (status, asked) == (409 if rule.to == "refuse" else 200, expected), path


async def test_calls_that_change_one_of_many_are_refused_with_a_remedy() -> None:
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


async def test_clients_of_one_server_get_one_servers_answer(house, first, second) -> None:
    first.answers["/pause"] = second.answers["/pause"] = (200, {"status": "paused"})
    first.answers["/is_paused"] = (200, {"is_paused": True, "x": 1})
    second.answers["/is_paused"] = (200, {"is_paused": False, "x": 2})
    first.answers["/get_world_size"] = (200, {"world_size": 4})
    second.answers["/get_world_size"] = (200, {"world_size": 2})
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


@pytest.mark.parametrize("said", [b"plain", {"world_size": "many"}, {"world_size": True}, {}, [1]])
async def test_disagreeing_fields_are_left_out(said: Any, house, first, second) -> None:
    first.answers["/get_world_size"] = (200, {"world_size": 4})
    second.answers["/get_world_size"] = (200, said)
    status, answer = await house.ask("GET", "/get_world_size")
    assert status == 200
    assert "world_size" not in answer


async def test_a_partial_failure_is_retryable(house, first, second) -> None:
    """Not 207, which SkyRL and prime-rl take for success."""
    second.answers["/reset_prefix_cache"] = (500, {"error": "no"})
    status, answer = await house.ask("POST", "/reset_prefix_cache", {})
    assert (status, answer["error"]["code"]) == (502, 502)
    assert f"{B} (500)" in answer["error"]["message"]
    assert (answer["succeeded"], answer["failed"][0]["url"]) == (1, B)


@pytest.mark.parametrize(("said", "told"), [(404, 404), (422, 422), (500, 502)])
async def test_a_refusal_by_all_is_the_callers_fault(
    said: int, told: int, house, first, second
) -> None:
    for instance in (first, second):
        instance.answers["/start_profile"] = (said, {"error": "no"})
    status, answer = await house.ask("POST", "/start_profile", {})
    assert (status, answer["error"]["code"]) == (told, told)


async def test_an_unreachable_instance_fails_no_broadcast(house, first, second) -> None:
    second.dead = True
    await until(lambda: not house.driver.supervisors[B].joined, 30)
    second.answers["/resume"] = (500, {"error": "no"})
    status, answer = await house.ask("POST", "/resume")
    assert (status, answer["failed"], answer["away"][0]["url"]) == (200, [], B)
    assert (await house.ask("POST", "/reset_prefix_cache"))[0] == 200
    assert paths_of(second) == ["/resume"]
    assert (await house.ask("GET", "/get_world_size"))[1]["total"] == 1


@pytest.mark.scene(live={"poll_s": 0.05})
async def test_a_held_instance_resumes_after_its_return(house, first, second) -> None:
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
    assert not supervisor.control.held
    assert house.driver.versions.gate(B) == ""


async def test_a_broadcast_without_instances_is_refused() -> None:
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


async def test_a_held_instance_gets_no_requests(house, first, second) -> None:
    versions = house.driver.versions
    await house.ask("POST", "/pause?mode=keep&clear_cache=false")
    assert all(versions.gate(name) for name in (A, B))
    await house.ask("POST", "/resume")
    assert not any(versions.gate(name) for name in (A, B))


async def test_a_partly_awake_instance_gets_no_requests(house, first, second) -> None:
    """As with SkyRL's servers on the trainer's GPUs: weights first, then the KV cache."""
    await house.ask("POST", "/sleep?level=1")
    for instance in (first, second):
        instance.answers["/wake_up?tags=weights"] = (200, {"status": "sleeping"})
        instance.answers["/wake_up?tags=kv_cache"] = (200, {"status": "awake"})
    for tag, still in (("weights", True), ("kv_cache", False)):
        assert (await house.ask("POST", f"/wake_up?tags={tag}"))[0] == 200
        for name in (A, B):
            assert bool(house.driver.versions.gate(name)) is still
            assert house.driver.supervisors[name].control.held is still


async def test_the_clients_key_is_enough_for_skyrl_s_own_generate(house, first, second) -> None:
    browser = {"Origin": "http://somewhere"}  # which no administrator's call may show
    assert (await house.ask("POST", "/skyrl/v1/generate", {}, **browser))[0] == 200
    assert (await house.ask("POST", "/skyrl/v1/load_lora_adapter", {}, **browser))[0] == 403
    assert len(first.asked) + len(second.asked) == 1


async def test_a_path_in_other_letters_is_the_same_row(house, first, second) -> None:
    assert (await ask_raw(house, request("POST", "/p%61use")))[0] == 200
    assert all(paths_of(each) == ["/pause"] for each in house.instances.values())  # type: ignore[arg-type]
    assert (await ask_raw(house, request("DELETE", "/pause")))[0] == 405


A, B = "http://a:1", "http://b:1"


async def _add(house: House, instance: Upstream) -> None:
    await instance.open()
    house.instances[instance.name] = instance


async def test_workers_are_listed_added_and_removed(house) -> None:
    await _add(house, Upstream(B))
    status, added = await house.ask("POST", "/workers", {"url": B, "labels": {"x": "y"}})
    assert (status, added["url"], added["is_healthy"]) == (201, B, True)
    status, listed = await house.ask("GET", "/workers")
    assert [worker["url"] for worker in listed["workers"]] == [A, B]
    assert listed["total"] == 2
    assert await house.ask("GET", f"/workers/{added['id']}") == (200, added)
    assert (await house.ask("DELETE", f"/workers/{added['id']}"))[0] == 200
    assert house.instances[B].closed
    assert (await house.ask("DELETE", f"/workers/{quote(A, safe='')}"))[0] == 200
    assert (await house.ask("GET", "/list_workers")) == (200, {"urls": []})


async def test_instances_are_selected_by_query(house) -> None:
    await _add(house, Upstream(B))
    added = await house.ask("POST", f"/add_worker?url={B}")
    assert added == (200, f"Successfully added worker: {B}")
    removed = await house.ask("POST", f"/remove_worker?url={quote(B, safe='')}")
    assert removed == (200, f"Successfully removed worker: {B}")
    assert list(house.driver.supervisors) == [A]
    assert (await house.ask("POST", "/add_worker"))[0] == 400


async def test_invalid_workers_are_refused(house) -> None:
    status, said = await house.ask("POST", "/workers", {"url": A})
    assert (status, said["error"]["message"]) == (400, f"instance {A!r} is here already")
    status, said = await house.ask("POST", "/workers", {"url": "http://nobody:1"})
    assert status == 502
    assert "refused" in said["error"]["message"]
    status, said = await house.ask("POST", "/workers", {"link": A})
    assert (status, "url" in said["error"]["message"]) == (400, True)
    assert (await house.ask("DELETE", "/workers/nobody"))[0] == 404
    assert (await house.ask("POST", "/remove_worker?url=nobody"))[0] == 404


async def test_control_reaches_every_instance(house, first, second) -> None:
    status, answer = await house.ask("POST", "/collective_rpc?debug=1", {"method": "m"}, X_Mine="7")
    assert (status, answer["total"], answer["succeeded"]) == (200, 2, 2)
    assert answer["failed"] == []
    for instance in house.instances.values():
        (asked,) = instance.asked
        assert asked["path"] == "/collective_rpc?debug=1"
        assert asked["body"] == '{"method": "m"}'
        assert asked["headers"]["x-mine"] == "7"
        assert asked["headers"]["authorization"] == "Bearer instance"
    for result in answer["results"].values():
        assert result["status"] == 200
        assert result["body"]["method"] == "POST"


async def test_a_partial_failure_is_reported(house, first, second) -> None:
    second.answers["/update_weights"] = (500, {"error": "bad path"})
    status, answer = await house.ask("POST", "/v1/rl/engine/update_weights", {})
    assert (status, answer["total"], answer["succeeded"]) == (207, 2, 1)
    (failure,) = answer["failed"]
    assert (failure["url"], failure["status"]) == (B, 500)
    assert failure["message"] == {"error": "bad path"}
    await second.go_down()
    status, answer = await house.ask("POST", "/v1/rl/engine/reset_mm_cache", {})
    assert status == 207
    assert answer["failed"][0]["error"] == "unreachable"
    first.answers["/reset_mm_cache"] = (500, b"no JSON")
    status, answer = await house.ask("POST", "/v1/rl/engine/reset_mm_cache", {})
    assert (status, answer["results"]) == (502, {})
    assert answer["failed"][0]["message"] == "no JSON"


async def test_selected_instances(house, first, second) -> None:
    status, listed = await house.ask("GET", "/v1/rl/workers")
    worker = listed["workers"][1]
    assert (worker["url"], worker["engine"], worker["weight_version"]) == (B, "vllm", "0")
    path = f"/v1/rl/engine/pause?mode=keep&selector=engine%3Dvllm,id%3D{worker['id']}"
    status, answer = await house.ask("POST", path)
    assert (status, list(answer["results"])) == (200, [worker["id"]])
    assert house.instances[B].asked[0]["path"] == "/pause?mode=keep"
    assert not house.instances[A].asked
    path = f"/v1/rl/workers/{worker['id']}/engine/resume"
    status, answer = await house.ask("POST", path)
    assert (status, answer["worker_id"]) == (200, worker["id"])
    for selector, wanted in (("url%3Dnobody", 404), ("colour%3Dred", 400), ("all", 200)):
        path = f"/v1/rl/engine/is_paused?selector={selector}"
        assert (await house.ask("GET", path))[0] == wanted


async def test_one_instance_is_profiled(house, first, second) -> None:
    _, listed = await house.ask("GET", "/workers")
    engine = f"/v1/rl/workers/{listed['workers'][1]['id']}/engine"
    assert (await house.ask("POST", f"{engine}/start_profile", {"max_iterations": 9}))[0] == 200
    assert (await house.ask("POST", f"{engine}/stop_profile"))[0] == 200
    assert paths_of(second) == ["/start_profile", "/stop_profile"]
    assert msgspec.json.decode(second.asked[0]["body"]) == {"max_iterations": 9}
    assert not first.asked
    second.answers["/start_profile"] = (404, {"detail": "Not Found"})
    assert (await house.ask("POST", f"{engine}/start_profile", {}))[0] == 404


async def test_a_manual_pause_is_known_to_the_supervisor(house) -> None:
    supervisor = house.driver.supervisors[A]
    for holding, releasing in (("pause", "resume"), ("sleep?level=0", "wake_up")):
        await house.ask("POST", f"/{holding}")
        assert supervisor.control.held
        await house.ask("POST", f"/{releasing}")
        assert not supervisor.control.held
    house.instances[A].answers["/pause"] = (404, {})
    await house.ask("POST", "/pause")
    assert not supervisor.control.held


async def test_a_session_that_has_ended_is_forgotten(house) -> None:
    sessions = house.driver.pump.scheduler.state.sessions
    assert await house.ask("POST", "/finish_session?session_id=s") == (
        200,
        {"session_id": "s", "finished": False},
    )
    sessions.sent("s", A)
    status, said = await house.ask("POST", "/finish_session?session_id=s")
    assert (status, said["finished"], len(sessions)) == (200, True, 0)
    assert not house.driver.pump.scheduler.state.anomalies
    assert (await house.ask("POST", "/finish_session"))[0] == 400


async def test_a_client_that_hangs_up_does_not_stop_a_broadcast_halfway(
    house, first, second
) -> None:
    first.stream = asyncio.Queue()  # it answers when told
    supervisor: Any = house.driver.supervisors[A]
    asking = asyncio.create_task(house.ask("POST", "/pause"))
    await until(lambda: first.asked and second.asked)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    first.stream.put_nowait(b"{}")
    first.stream.put_nowait(None)
    await until(lambda: supervisor.control.held)


@pytest.mark.parametrize(
    "quoted", ["http%3A%2F%2Fa%3A1", "http%3a%2f%2fa%3a1", "http%3A/a%3A1", "http:/a:1", A, f"{A}/"]
)
async def test_a_worker_is_removed_by_its_url(quoted: str, house) -> None:
    """As vllm-router's clients send it."""
    assert (await ask_raw(house, request("DELETE", f"/workers/{quoted}")))[0] == 200
    assert not house.driver.supervisors


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("/pause?mode=keep", "/pause?mode=keep"),
        ("/update_weights?path=a%26b%3Dc", "/update_weights?path=a%26b%3Dc"),
        ("/update_weights?path=%2525", "/update_weights?path=%2525"),
        ("/update_weights?a=1+2&b=%2B&c=%0A", "/update_weights?a=1+2&b=%2B&c=%0A"),
        ("/v1/rl/engine/pause?selector=all&x=%26y", "/pause?x=%26y"),
        ("/v1/rl/engine/pause?x=%26selector=1", "/pause?x=%26selector=1"),
        ("/v1/rl/engine/pause?%73elector=all", "/pause"),
        ("/v1/rl/engine/v1/deep/path?x", "/v1/deep/path?x"),
        ("/v1/rl/workers/{id}/engine/pause?x=%26", "/pause?x=%26"),
    ],
)
async def test_a_query_is_passed_on_as_it_came(asked: str, sent: str, house) -> None:
    path = asked.replace("{id}", "http%3A%2F%2Fa%3A1")
    assert (await ask_raw(house, request("POST", path)))[0] == 200
    assert [asked["path"] for asked in house.instances[A].asked] == [sent]


@pytest.mark.parametrize(
    "path", ["pause%3Fmode=abort", "%2e%2e/pause", "../pause", "a//b", "a%2Fb", "x%0d%0aX-Evil:1"]
)
async def test_an_ambiguous_path_is_not_forwarded(path: str, house) -> None:
    for room in ("/v1/rl/engine/", "/v1/rl/workers/http%3A%2F%2Fa%3A1/engine/"):
        assert (await ask_raw(house, request("POST", room + path)))[0] == 404
    assert not house.instances[A].asked


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "[["),
        (b"\xff\xfe", "\ufffd"),
        (b'"\xff"', '"\ufffd"'),
        (b"9" * 25, "999"),
        (b'{"a": 1e999}', '{"a": 1e999}'),
        (b'{"x": [1, null]}', "{'x': [1, None]}"),
        (b"", ""),
    ],
)
@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
async def test_any_instance_answer_can_be_reported(
    body: bytes, told: str, accept: str, house
) -> None:
    house.instances[A].answers["/weight_info"] = (200, body)
    async with house.session.get("/weight_info", headers={"Accept": accept}) as response:
        assert response.status == 200
        decode = msgspec.msgpack if accept.endswith("msgpack") else msgspec.json
        (result,) = decode.decode(await response.read())["results"].values()
    assert str(result["body"]).startswith(told)
