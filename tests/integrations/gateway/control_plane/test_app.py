"""Who may do what, and what is passed on to an instance as it came."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web

from rollout_sched.integrations.gateway.control_plane.trainer_api import ROLLOUT
from rollout_sched.integrations.gateway.data_plane.data_plane import UNADMITTED, UNKNOWN_KEY
from rollout_sched.live.requests.token_payload import TokenPayload
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.live.scripted import until

A, B = "http://a:1", "http://b:1"


class TestDoors:
    @pytest.mark.parametrize(
        "header",
        [
            {"Origin": "http://evil"},
            {"X-Forwarded-For": "9.9.9.9"},
            {"Forwarded": "for=9.9.9.9"},
            {"Via": "1.1 proxy"},
            {"Host": "evil.example"},
        ],
    )
    async def test_only_local_programs_need_no_key(self, header: dict[str, str], house) -> None:
        assert (await house.ask("GET", "/admin/state"))[0] == 200
        assert (await house.ask("GET", "/admin/state", **header))[0] == 403
        assert (await house.ask("GET", "/health", **header))[0] == 200

    @pytest.mark.parametrize(
        "path", ["/v1/../pause", "/v1//pause", "/v1/%2e%2e/pause", "/./pause", "/v1/a%2fb"]
    )
    async def test_ambiguous_paths_are_refused(self, path: str, house, instance) -> None:
        host, port = house.service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == b"404"
        writer.close()
        assert not instance.asked


class TestPassingOn:
    async def test_other_calls_pass_unchanged(self, house, instance) -> None:
        async with house.session.post(
            "/v1/embeddings?x=1&y=%20",
            data=b'{"made": "up"}',
            headers={"X-Mine": "7", "X-Request-Id": "r", "Authorization": "Bearer k"},
        ) as response:
            assert response.headers["X-Of-Instance"] == "yes"
            assert response.headers["X-Rollout-Sched-Instance"] == A
            assert response.headers["Connection"] == "close"
            asked = await response.json()
        assert (asked["method"], asked["path"]) == ("POST", "/v1/embeddings?x=1&y=%20")
        assert asked["body"] == '{"made": "up"}'
        assert asked["headers"]["x-mine"] == "7"
        assert asked["headers"]["x-request-id"] == "r"
        assert asked["headers"]["authorization"] == "Bearer instance"
        instance.answers["/v1/score"] = (422, {"detail": "no"})
        assert await house.ask("GET", "/v1/score") == (422, {"detail": "no"})

    @pytest.mark.parametrize("location", ["http://b:1/v1/score", "//b/v1/score", "/v1/score"])
    async def test_a_redirect_stays_at_the_gateway(self, location: str, house, instance) -> None:
        async def redirect(request: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": location})

        instance.answering = redirect
        asking = house.session.post("/v1/score/", allow_redirects=False)
        async with asking as response:
            assert (response.status, response.headers["Location"]) == (307, "/v1/score")

    async def test_a_stream_passes_as_it_arrives(self, house, instance) -> None:
        instance.stream = asyncio.Queue()
        asking = asyncio.create_task(house.session.post("/v1/responses"))
        instance.stream.put_nowait(b"one")
        response = await asking
        assert await response.content.readany() == b"one"
        instance.stream.put_nowait(b"two")
        assert await response.content.readany() == b"two"
        instance.stream.put_nowait(None)
        assert await response.content.read() == b""

    async def test_a_chain_of_responses_stays_where_its_state_is(self, house, first, second):
        """By turns, every other call of a chain was answered 404."""
        first.answers["/v1/responses/r1"] = 404, {}
        for _ in range(3):
            body = {"previous_response_id": "r1", "input": "more"}
            assert (await house.ask("POST", "/v1/responses", body))[0] == 200
            assert (await house.ask("POST", "/v1/responses/r1/cancel", {}))[0] == 200
        assert not [one for one in first.asked if one["method"] == "POST"]
        second.answers["/v1/responses/r1"] = 404, {}
        status, error = await house.ask("POST", "/v1/responses", body)
        assert status == 404
        assert "no instance has the response 'r1'" in error["error"]["message"]
        assert (await house.ask("POST", "/v1/responses", {"input": "new"}))[0] == 200

    @pytest.mark.scene(policy="dplb")
    async def test_other_calls_go_to_the_least_loaded_instance(self, house, first, second) -> None:
        house.driver.submit(TokenPayload([1], {}), 1, 9)
        await until(lambda: first.orders or second.orders)
        busy, idle = (first, second) if first.orders else (second, first)
        await house.ask("POST", "/tokenize")
        assert idle.asked
        assert not busy.asked

    async def test_a_call_without_instances_is_refused(self) -> None:
        async with House() as house:
            assert (await house.ask("POST", "/tokenize"))[0] == 503

    async def test_a_call_to_a_dead_instance_is_a_502(self, house, instance) -> None:
        await instance.go_down()
        status, said = await house.ask("POST", "/tokenize")
        assert (status, said["error"]["code"]) == (502, 502)


async def test_health_needs_an_instance() -> None:
    instance = Upstream()
    instance.dead = True
    async with House(instance) as house:
        assert await house.ask("GET", "/ping") == (503, _error(503, "no instance has joined"))
        house.driver.supervisors[instance.name].health.check_now()
        instance.dead = False
        await until(lambda: house.service.gateway.healthy)
        assert await house.ask("GET", "/health") == (200, "")
        assert await house.ask("POST", "/ping") == (200, "")


async def test_models_are_the_fleets() -> None:
    first, second = Upstream("http://a:1"), Upstream("http://b:1")
    for instance, length in ((first, 8192), (second, 4096)):
        instance.describes(model="tiny", max_model_len=length)
    async with House(first, second) as house:
        status, models = await house.ask("GET", "/v1/models")
        assert status == 200
        (model,) = models["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 8192)
        assert model["owned_by"] == "rollout-sched"


async def test_models_list_adapters_that_were_loaded_meanwhile() -> None:
    instance = Upstream()
    instance.describes(model="tiny", max_model_len=8192)
    async with House(instance) as house:
        instance.adapters = ("adapter",)
        _, models = await house.ask("GET", "/v1/models")
        found = [(one["id"], one["parent"], one["max_model_len"]) for one in models["data"]]
        assert found == [("tiny", None, 8192), ("adapter", "tiny", 8192)]
        instance.mute, instance.models = True, ("tiny",)
        _, models = await house.ask("GET", "/v1/models")
        assert [one["id"] for one in models["data"]] == ["tiny"]


async def test_version(house) -> None:
    status, said = await house.ask("GET", "/version")
    assert status == 200
    assert said["version"][0].isdigit()


async def test_metrics_are_prometheus_text(house) -> None:
    async with house.session.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    assert "\nrollout_sched_in_flight 0.0\n" in text
    line = 'rollout_sched_instance_status{status="serving",url="http://a:1"} 1.0\n'
    assert line in text


async def test_a_generation_without_a_key_is_refused_before_its_body_is_sent(tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\n")
    asks = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n"
    async with House(Upstream(), api_key_file=keys) as house:
        port = int(house.service.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asks.encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"content-type: application/json" in head
        assert msgspec.json.decode(body) == _error(401, UNADMITTED)
        writer.close()
        asked = {"model": "tiny", "prompt": "x", "max_tokens": 3}
        status, said = await house.ask("POST", "/v1/completions", asked)
        assert (status, said) == (401, _error(401, UNADMITTED))
        wrong = {"Authorization": "Bearer beta"}
        status, said = await house.ask("POST", "/v1/completions", asked, **wrong)
        assert (status, said) == (401, _error(401, UNKNOWN_KEY))


def _error(status: int, text: str) -> dict:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"error": {"message": text, "type": kind, "code": status}}


@pytest.mark.parametrize("root", ["/admin", ROLLOUT])
async def test_weights_are_published_and_the_state_says_so(root: str, house) -> None:
    body = {"version": 1, "applied": True, "wait": True}
    assert await house.ask("POST", f"{root}/weights", body) == (200, {"version": 1})
    body = {"version": 2, "applied": True}
    assert await house.ask("POST", f"{root}/weights", body) == (202, {"version": 2})
    status, state = await house.ask("GET", f"{root}/state")
    assert (status, state["version"]) == (200, 2)
    assert await house.ask("POST", f"{root}/weights", body) == (202, {"version": 2})
    body = {"version": 2, "reload": {"path": "/", "visible_here": False}}
    assert (await house.ask("POST", f"{root}/weights", body))[0] == 400
