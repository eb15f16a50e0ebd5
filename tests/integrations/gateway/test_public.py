"""What every client may ask."""

from __future__ import annotations

import asyncio

import msgspec

from rollout_sched.integrations.gateway.data_plane.data_plane import UNADMITTED
from tests.integrations.gateway.house import House, Upstream, run
from tests.live.scripted import until


def test_health_is_that_somebody_is_here() -> None:
    async def scene() -> None:
        instance = Upstream()
        instance.dead = True
        async with House(instance) as house:
            assert await house.ask("GET", "/ping") == (503, _error(503, "no instance has joined"))
            house.driver.supervisors[instance.name].health.check_now()
            instance.dead = False
            await until(lambda: house.service.gateway.healthy)
            assert await house.ask("GET", "/health") == (200, "")
            assert await house.ask("POST", "/ping") == (200, "")

    run(scene())


def test_models_are_the_fleets() -> None:
    async def scene() -> None:
        first, second = Upstream("http://a:1"), Upstream("http://b:1")
        for instance, length in ((first, 8192), (second, 4096)):
            instance.description = msgspec.structs.replace(
                instance.description, model="tiny", max_model_len=length
            )
        async with House(first, second) as house:
            status, models = await house.ask("GET", "/v1/models")
            assert status == 200
            (model,) = models["data"]
            assert (model["id"], model["max_model_len"]) == ("tiny", 4096)
            assert model["owned_by"] == "rollout-sched"

    run(scene())


def test_version() -> None:
    async def scene() -> None:
        async with House(Upstream()) as house:
            status, said = await house.ask("GET", "/version")
            assert status == 200
            assert said["version"][0].isdigit()

    run(scene())


def test_metrics_are_prometheus_text() -> None:
    async def scene() -> None:
        async with House(Upstream()) as house:
            async with house.session.get("/metrics") as response:
                assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                text = await response.text()
            assert "\nrollout_sched_in_flight 0.0\n" in text
            line = 'rollout_sched_instance_status{status="serving",url="http://a:1"} 1.0\n'
            assert line in text

    run(scene())


def test_clients_keys(tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nalpha\n\nbeta\n")

    async def scene() -> None:
        async with House(Upstream(), api_key_file=keys) as house:
            for path in ("/health", "/metrics", "/version"):
                assert (await house.ask("GET", path))[0] == 200
            for path in ("/v1/models", "/v1/embeddings"):
                assert (await house.ask("GET", path))[0] == 401
                assert (await house.ask("GET", path, Authorization="Bearer gamma"))[0] == 401
                assert (await house.ask("GET", path, Authorization="Bearer b\u00e9ta"))[0] == 401
                assert (await house.ask("GET", path, Authorization="Bearer beta"))[0] == 200

    run(scene())


def test_a_generation_without_a_key_is_refused_before_its_body_is_sent(tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\n")
    asks = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n"

    async def scene() -> None:
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

    run(scene())


def _error(status: int, text: str) -> dict:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"error": {"message": text, "type": kind, "code": status}}
