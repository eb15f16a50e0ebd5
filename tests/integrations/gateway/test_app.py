"""Who may do what, and what is passed on to an instance as it came."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from rollout_sched.live.requests.token_payload import TokenPayload
from tests.integrations.gateway.house import House, Upstream, run
from tests.integrations.gateway.scripted import completion
from tests.live.scripted import until

A, B = "http://a:1", "http://b:1"


class TestDoors:
    def test_the_admin_key(self, tmp_path) -> None:
        keys = tmp_path / "keys"
        keys.write_text("root\n")
        closed = [
            ("GET", "/admin/state"),
            ("GET", "/rollout/v1/state"),
            ("POST", "/rollout/v1/batches/next"),
            ("GET", "/workers"),
            ("POST", "/add_worker?url=http://x:1"),
            ("POST", "/pause"),
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/rl/engine/pause"),
            ("GET", "/server_info"),
            ("POST", "/unheard_of"),
        ]

        async def scene() -> None:
            instance = Upstream(A)
            async with House(instance, admin_key_file=keys) as house:
                for method, path in closed:
                    assert (await house.ask(method, path))[0] == 401, path
                    wrong = await house.ask(method, path, Authorization="Bearer roots")
                    assert wrong[0] == 401, path
                assert not instance.asked
                assert instance.calls == [("version", 0)]  # as it joined
                for path in ("/tokenize", "/v1/embeddings", "/inference/v1/render"):
                    assert (await house.ask("POST", path))[0] == 200
                right = await house.ask("GET", "/admin/state", Authorization="Bearer root")
                assert right[0] == 200

        run(scene())

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
    def test_without_a_key_only_programs_of_this_machine(self, header: dict[str, str]) -> None:
        async def scene() -> None:
            async with House(Upstream(A)) as house:
                assert (await house.ask("GET", "/admin/state"))[0] == 200
                assert (await house.ask("GET", "/admin/state", **header))[0] == 403
                assert (await house.ask("GET", "/health", **header))[0] == 200

        run(scene())

    @pytest.mark.parametrize(
        "path", ["/v1/../pause", "/v1//pause", "/v1/%2e%2e/pause", "/./pause", "/v1/a%2fb"]
    )
    def test_paths_that_may_mean_something_else_to_an_instance(self, path: str) -> None:
        async def scene() -> None:
            instance = Upstream(A)
            async with House(instance) as house:
                host, port = house.service.url.removeprefix("http://").split(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert (await reader.readline()).split()[1] == b"404"
                writer.close()
                assert not instance.asked

        run(scene())

    def test_a_body_that_is_too_long(self) -> None:
        async def scene() -> None:
            async with House(Upstream(A), max_body=1000) as house:
                status, said = await house.ask("POST", "/rollout/v1/groups", ["x" * 1000])
                assert (status, said["error"]["code"]) == (413, 413)

        run(scene())


class TestPassingOn:
    def test_untouched(self) -> None:
        async def scene() -> None:
            instance = Upstream(A)
            async with House(instance) as house:
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

        run(scene())

    def test_a_stream_as_it_comes(self) -> None:
        async def scene() -> None:
            instance = Upstream(A)
            instance.stream = asyncio.Queue()
            async with House(instance) as house:
                asking = asyncio.create_task(house.session.post("/v1/responses"))
                instance.stream.put_nowait(b"one")
                response = await asking
                assert await response.content.readany() == b"one"
                instance.stream.put_nowait(b"two")
                assert await response.content.readany() == b"two"
                instance.stream.put_nowait(None)
                assert await response.content.read() == b""

        run(scene())

    def test_a_stream_that_breaks_does_not_look_complete(self) -> None:
        async def scene() -> None:
            instance = Upstream(A)
            instance.stream = asyncio.Queue()
            async with House(instance) as house:
                instance.stream.put_nowait(b"one")
                response = await house.session.post("/v1/responses")
                assert await response.content.readany() == b"one"
                await instance.go_down()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.content.read()

        run(scene())

    def test_to_the_least_loaded(self) -> None:
        async def scene() -> None:
            first, second = Upstream(A), Upstream(B)
            async with House(first, second, policy="dplb") as house:
                house.driver.submit(TokenPayload([1], {}), 1, 9)
                await until(lambda: first.orders or second.orders)
                busy, idle = (first, second) if first.orders else (second, first)
                await house.ask("POST", "/tokenize")
                assert idle.asked
                assert not busy.asked

        run(scene())

    def test_to_nobody(self) -> None:
        async def scene() -> None:
            async with House() as house:
                assert (await house.ask("POST", "/tokenize"))[0] == 503

        run(scene())

    def test_to_one_that_is_down(self) -> None:
        async def scene() -> None:
            instance = Upstream(A)
            async with House(instance) as house:
                await instance.go_down()
                status, said = await house.ask("POST", "/tokenize")
                assert (status, said["error"]["code"]) == (502, 502)

        run(scene())


def test_the_hot_path_is_on_the_same_port() -> None:
    async def scene() -> None:
        instance = Upstream(A)
        instance.answers["/v1/completions"] = (200, completion([5, 6]))
        async with House(instance) as house:
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 9}
            async with house.session.post("/v1/completions", json=body) as response:
                answer = await response.json()
            assert answer["choices"][0]["token_ids"] == [5, 6]
            assert answer["rollout_sched"]["segments"][0]["instance"] == A
            async with house.session.get("/metrics") as response:
                text = await response.text()
            assert 'rollout_sched_requests_total{outcome="answered"} 1.0\n' in text
            assert 'rollout_sched_tokens_total{outcome="answered"} 2.0\n' in text

    run(scene())
