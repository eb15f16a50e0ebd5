"""The whole gateway: started, used, stopped, and refused what cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rollout_sched import journal
from rollout_sched.cli import main
from rollout_sched.client import RolloutScheduler
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from tests.integrations.faults.fleet import SPEC
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.gateway.scripted import completion
from tests.integrations.vllm.scripted import ScriptedVllm, generated
from tests.live.scripted import until
from tests.virtual_net import run


def options(**other: Any) -> Options:
    return Options(**{"policy": "dplb", "instances": [], "port": 0, "grace_s": 0.5, **other})


async def test_a_gateway_serves_vllm_instances(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    said: list[str] = []
    server = ScriptedVllm()
    server.api_key = "secret"
    server.missing = {"/start_weight_update"}
    made = generated([10, 11, 12], "length", [("0", 0, 3)])
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    server.answer("/inference/v1/generate", {**made, "usage": usage})
    async with server.serving():
        service = Service(
            options(
                instances=[server.url], instance_api_key_file=key, journal=tmp_path / "journal"
            ),
            said.append,
        )
        await service.open()
        async with aiohttp.ClientSession(service.url) as client:
            body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}
            async with client.post("/inference/v1/generate", json=body) as response:
                answer = await response.json()
            assert answer["choices"][0]["token_ids"] == [10, 11, 12]
        await service.close()
    assert any("policy dplb (" in line for line in said)
    (offer,) = [line for line in said if line.startswith(f"instance {server.url}: tiny, 64 ")]
    assert "weight_versions" in offer
    note = said[said.index(offer) + 1]
    assert note.startswith("  cannot receive weights by weight transfer")
    assert said[-1] == f"listening on {service.url}"
    header, entries = journal.read(tmp_path / "journal")
    assert header.policy == "dplb"
    kinds = [type(entry.event).__name__ for entry in entries]
    assert kinds[:3] == ["InstanceJoined", "RequestSubmitted", "RequestFinished"]


@pytest.mark.parametrize("use", ["by_cost", "none"])
async def test_an_ignored_header_is_logged(use: str, tmp_path: Path) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text(f'[affinity]\nuse = "{use}"\n')
    async with House(policy=str(policy)) as house:
        assert any("X-Session-ID is ignored" in line for line in house.said) is (use == "none")


async def test_an_unreachable_instance_is_logged_and_joins_later() -> None:
    late = Upstream("http://late:1")
    late.dead = True
    async with House(late) as house:
        assert any("late:1: away, joins when it is ready (" in line for line in house.said)
        late.dead = False
        house.driver.supervisors[late.name].health.check_now()
        await until(lambda: any("late:1: a model, 8 slots" in line for line in house.said))


@pytest.mark.scene(grace_s=20.0)
async def test_closing_finishes_running_calls_and_refuses_new_ones(house, instance) -> None:
    instance.stream = asyncio.Queue()
    body = {"model": "tiny", "prompt": [1], "max_tokens": 9}
    asking = asyncio.create_task(house.session.post("/v1/completions", json=body))
    await until(lambda: instance.asked)
    closing = asyncio.create_task(house.service.close())
    await asyncio.sleep(0.05)
    with pytest.raises(aiohttp.ClientConnectionError):
        await house.session.get("/health")
    instance.stream.put_nowait(json.dumps(completion([5])).encode())
    instance.stream.put_nowait(None)
    response = await asking
    assert (await response.json())["choices"][0]["token_ids"] == [5]
    await closing


@pytest.mark.scene(grace_s=0.05)
async def test_a_call_that_exceeds_the_grace_period_gets_an_error(house, instance) -> None:
    """The connection was closed without a word."""
    instance.stream = asyncio.Queue()
    body = {"model": "tiny", "prompt": [1], "max_tokens": 9}
    asking = asyncio.create_task(house.session.post("/v1/completions", json=body))
    await until(lambda: instance.asked)
    await house.service.close()
    response = await asking
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert "shutting down" in (await response.json())["error"]["message"]


@pytest.mark.scene(grace_s=0.05)
async def test_a_stream_that_exceeds_the_grace_period_ends_in_an_error(house, instance) -> None:
    instance.stream = asyncio.Queue()
    body = {"model": "tiny", "prompt": [1], "max_tokens": 9, "stream": True}
    asking = asyncio.create_task(house.session.post("/v1/completions", json=body))
    await until(lambda: instance.asked)
    event = json.dumps({"choices": [{"index": 0, "text": "a", "token_ids": [5]}]})
    instance.stream.put_nowait(b"data: %b\n\n" % event.encode())
    response = await asking
    assert response.status == 200
    await house.service.close()
    events = (await response.text()).split("\n\n")
    assert json.loads(events[0].removeprefix("data: ")) == json.loads(event)
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == 503
    assert events[2:] == [""]


async def test_an_open_gateway_logs_a_warning() -> None:
    said: list[str] = []
    Service(options(host="0.0.0.0"), said.append)
    assert any("any client that can reach 0.0.0.0 may use this gateway" in line for line in said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "nothing"], "nothing"),
        (["--instance", "ftp://x"], "write it as http://host:port"),
        (["--instance", "http://127.0.0.1:1", "--instance", "http://127.0.0.1:1/"], "given twice"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys: cannot be read"),
        (["--journal", "/nowhere/journal"], "/nowhere/journal"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    defaults = ["--policy", "dplb", "--instance", "http://127.0.0.1:1", "--port", "0"]
    given = [
        value
        for name, value in zip(defaults[::2], defaults[1::2], strict=True)
        if name not in arguments
        for value in (name, value)
    ]
    assert main(["serve", *given, *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "70000", "x"])
def test_bad_ports(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["serve", "--policy", "dplb", "--instance", "http://127.0.0.1:1", "--port", value])
    assert exit.value.code == 2
    assert value in capsys.readouterr().err


def test_a_port_that_is_taken_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ["serve", "--policy", "dplb", "--instance", "http://127.0.0.1:1"]
        journal_file = str(tmp_path / "journal")
        code = main([*arguments, "--port", port, "--journal", journal_file])
    assert code == 2
    assert "in use" in capsys.readouterr().err
    assert not (tmp_path / "journal").exists()


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`serve` as a process of its own, killed at the end if it still runs."""
    code = "from rollout_sched.cli import main; raise SystemExit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        "--policy",
        "dplb",
        "--port",
        "0",
        "--drain-s",
        "0",
        *arguments,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_gateway_runs_as_a_process(number: signal.Signals) -> None:
    with socket.socket() as closed:  # bound but not listening: a connection is refused
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with process("--instance", url) as started:
            assert started.stdout is not None
            lines = []
            for line in started.stdout:
                lines.append(line)
                if line.startswith("listening on "):
                    break
            assert any(f"instance {url}: away" in line for line in lines)
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(lines[-1].split()[-1] + "/health", timeout=10)
            started.send_signal(number)
            out, err = started.communicate(timeout=20)
    assert (started.returncode, out) == (0, "stopping\n"), err


@pytest.mark.real_time
async def test_the_openai_client_is_served() -> None:
    openai = pytest.importorskip("openai")
    instance = Upstream()
    instance.answers["/v1/completions"] = (200, completion([5, 6]))
    async with (
        House(instance) as house,
        openai.AsyncOpenAI(
            base_url=f"{house.service.url}/v1", api_key="any", max_retries=0
        ) as client,
    ):
        models = await client.models.list()
        assert [model.owned_by for model in models.data] == ["rollout-sched"]
        answer = await client.completions.create(model="tiny", prompt="x", max_tokens=2)
        assert answer.choices[0].text == "w5 w6 "
        assert answer.usage.completion_tokens == 2
        with pytest.raises(openai.BadRequestError, match="prompt"):
            await client.completions.create(model="tiny", prompt=[], max_tokens=2)


class TestTheEnd:
    @pytest.mark.parametrize(
        ("method", "path", "body"),
        [
            ("POST", "/pause", None),
            ("POST", "/v1/rl/engine/update_weights", {}),
            ("POST", "/v1/embeddings", {}),
        ],
    )
    @pytest.mark.scene(grace_s=0.05)
    async def test_a_control_call_in_progress_gets_an_error_at_the_end(
        self, method: str, path: str, body: Any, house, instance
    ) -> None:
        async def never(request: web.Request) -> web.StreamResponse:
            instance.asked.append({})
            await asyncio.sleep(30)
            raise AssertionError

        instance.answering = never
        asking = asyncio.create_task(house.ask(method, path, body))
        await until(lambda: instance.asked)
        await house.service.close()
        status, said = await asking
        assert status == 503
        assert "the gateway stopped" in said["error"]["message"]

    @pytest.mark.scene(grace_s=0.05)
    async def test_a_cut_response_does_not_look_complete(self, house, instance) -> None:
        instance.stream = asyncio.Queue()
        instance.stream.put_nowait(b"one")
        response = await house.session.post("/v1/responses")
        assert await response.content.readany() == b"one"
        await house.service.close()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()

    @pytest.mark.scene(grace_s=0.05)
    async def test_a_waiting_publication_ends_with_the_gateway(self, house, instance) -> None:
        supervisor = house.driver.supervisors[instance.name]
        async with supervisor.control_lock:  # its update waits for its turn
            body = {"version": 1, "applied": True, "wait": True}
            asking = asyncio.create_task(house.ask("POST", "/rollout/v1/weights", body))
            await until(lambda: house.driver.pump.scheduler.state.progress.version == 1)
            await house.service.close()
            assert (await asking)[0] == 503

    async def test_the_journal_is_closed_after_any_failure(self, tmp_path: Path) -> None:
        async with House(Upstream(), journal=tmp_path / "journal") as house:
            trainer: Any = house.service.gateway.trainer
            close = trainer.close

            def fails() -> None:
                raise RuntimeError("not today")

            trainer.close = fails
            with pytest.raises(RuntimeError, match="not today"):
                await house.service.close()
            _, entries = journal.read(tmp_path / "journal")
            assert next(type(entry.event).__name__ for entry in entries) == "InstanceJoined"
            trainer.close = close


class TestAdminSocket:
    @pytest.mark.real_time
    async def test_the_admin_socket_needs_no_key_but_the_port_does(self, tmp_path: Path) -> None:
        path = tmp_path / "admin"
        async with House(Upstream(), admin_socket=path) as house:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert any(str(path) in line for line in house.said)
            status, said = await house.ask("GET", "/admin/state")
            assert (status, "--admin-socket" in said["error"]["message"]) == (403, True)
            assert (await house.ask("GET", "/health"))[0] == 200
            with pytest.raises(CallerError, match="another gateway listens on it"):
                async with House(Upstream(), admin_socket=path):
                    pass
            async with RolloutScheduler.connect(f"unix://{path}") as rollouts:
                assert (await rollouts.state())["version"] == 0
                await rollouts.remove_instance("http://a:1")
        assert not path.exists()

    @pytest.mark.real_time
    async def test_admin_socket_and_port_are_open_with_a_key_file(self, tmp_path: Path) -> None:
        (tmp_path / "keys").write_text("root\n")
        options = {"admin_socket": tmp_path / "admin", "admin_key_file": tmp_path / "keys"}
        async with House(Upstream(), admin_key="root", **options) as house:
            assert (await house.ask("GET", "/admin/state"))[0] == 200
            async with RolloutScheduler.connect(f"unix://{tmp_path / 'admin'}") as rollouts:
                await rollouts.state()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_listening_ends_the_gateway_in_order(
    number: signal.Signals, tmp_path: Path
) -> None:
    """An instance that takes a connection and says nothing holds up the start."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        file = tmp_path / "journal"
        with process("--instance", url, "--journal", str(file)) as started:
            silent.settimeout(20)
            taken, _ = silent.accept()
            with taken:
                started.send_signal(number)
                out, err = started.communicate(timeout=20)
    assert started.returncode == 0, err
    assert out.endswith("stopping\n")
    assert not file.exists()  # closed in order, and empty


def test_the_port_stays_open_until_load_balancers_have_noticed() -> None:
    with process("--instance", "http://127.0.0.1:1", "--drain-s", "60") as started:
        assert started.stdout is not None
        url = next(line for line in started.stdout if line.startswith("listening")).split()[-1]
        started.send_signal(signal.SIGTERM)
        while "the gateway stops soon" not in (said := refused(f"{url}/health")):
            assert "no instance has joined" in said
        assert urllib.request.urlopen(f"{url}/liveness", timeout=10).status == 200
        assert started.poll() is None
        started.send_signal(signal.SIGTERM)  # somebody is in a hurry
        started.communicate(timeout=20)
    assert started.returncode == -signal.SIGTERM


def refused(url: str) -> str:
    with pytest.raises(urllib.error.HTTPError, match="503") as error:
        urllib.request.urlopen(url, timeout=10)
    return error.value.read().decode()


def test_calls_are_refused_until_the_first_instance_joins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A misspelt URL: the client waited without an end, and nothing was logged."""

    async def main() -> None:
        server = FakeServer(EngineSettings(SPEC, speed=1000.0))
        port = 4711
        service = Service(options(instances=[f"http://127.0.0.1:{port}"]), lambda line: None)
        await service.open()
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}
        async with aiohttp.ClientSession(service.url) as client:
            for _ in range(2):  # one waits at first, the next is refused at once
                async with client.post("/inference/v1/generate", json=body) as response:
                    assert (response.status, response.headers["retry-after"]) == (503, "1")
                    assert "no instance has joined" in await response.text()
            assert f"no instance has joined, and 1 requests wait (http://127.0.0.1:{port}: " in (
                caplog.text
            )
            await server.start("127.0.0.1", port)
            while service.live.driver.view.least_loaded() is None:
                await asyncio.sleep(1.0)
            async with client.post("/inference/v1/generate", json=body) as response:
                assert response.status == 200
        await service.close()
        await server.close()

    run(main())


def test_a_second_signal_ends_the_gateway_at_once() -> None:
    """One who has sent half a request is waited for, but not by somebody in a hurry."""
    with process("--instance", "http://127.0.0.1:1") as started:
        assert started.stdout is not None
        url = next(line for line in started.stdout if line.startswith("listening")).split()[-1]
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as half:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            half.sendall(f"{head}Content-Length: 9\r\n\r\n".encode())
            assert half.recv(100).startswith(b"HTTP/1.1 100")
            started.send_signal(signal.SIGTERM)
            assert next(iter(started.stdout)) == "stopping\n"
            assert started.poll() is None
            started.send_signal(signal.SIGTERM)
            started.communicate(timeout=5)
    assert started.returncode == -signal.SIGTERM
