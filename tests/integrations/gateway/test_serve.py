"""The whole gateway: started, used, stopped, and refused what cannot be."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout_sched import journal
from rollout_sched.cli import main
from rollout_sched.integrations.gateway.serve import Options, Service
from tests.integrations.gateway.house import House, Upstream, run
from tests.integrations.gateway.scripted import completion
from tests.integrations.vllm.scripted import ScriptedVllm, generated
from tests.live.scripted import until


def options(**other: Any) -> Options:
    return Options(**{"policy": "dplb", "instances": [], "port": 0, "grace_s": 0.5, **other})


def test_in_front_of_vllm(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")

    async def scene() -> None:
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
                    instances=[server.url],
                    instance_api_key_file=key,
                    journal=tmp_path / "journal",
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

    run(scene())


def test_one_that_is_not_up_yet_is_said_and_joins() -> None:
    async def scene() -> None:
        late = Upstream("http://late:1")
        late.dead = True
        async with House(late) as house:
            assert any("late:1: not up yet, joins when it is (" in line for line in house.said)
            late.dead = False
            house.driver.attendants[late.name].look_now()
            await until(lambda: any("late:1: a model, 8 slots" in line for line in house.said))

    run(scene())


def test_what_runs_may_finish_and_nothing_new_comes() -> None:
    async def scene() -> None:
        instance = Upstream()
        instance.stream = asyncio.Queue()
        async with House(instance, grace_s=20.0) as house:
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

    run(scene())


def test_who_takes_too_long_is_told_so() -> None:
    """The connection was closed without a word."""

    async def scene() -> None:
        instance = Upstream()
        instance.stream = asyncio.Queue()
        async with House(instance, grace_s=0.05) as house:
            body = {"model": "tiny", "prompt": [1], "max_tokens": 9}
            asking = asyncio.create_task(house.session.post("/v1/completions", json=body))
            await until(lambda: instance.asked)
            await house.service.close()
            response = await asking
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert "shutting down" in (await response.json())["error"]["message"]

    run(scene())


def test_a_stream_that_takes_too_long_ends_in_an_error() -> None:
    async def scene() -> None:
        instance = Upstream()
        instance.stream = asyncio.Queue()
        async with House(instance, grace_s=0.05) as house:
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

    run(scene())


def test_an_open_gateway_says_so() -> None:
    async def scene() -> None:
        said: list[str] = []
        Service(options(host="0.0.0.0"), said.append)
        assert any("anybody who reaches 0.0.0.0 may use this gateway" in line for line in said)

    run(scene())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "nothing"], "nothing"),
        (["--instance", "ftp://x"], "give it as http://host:port"),
        (["--instance", "http://127.0.0.1:1", "--instance", "http://127.0.0.1:1/"], "there twice"),
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_as_a_process(number: signal.Signals) -> None:
    code = "from rollout_sched.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "serve", "--policy", "dplb"]
    with socket.socket() as closed:  # bound but not listening: a connection is refused
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with subprocess.Popen(
            [*command, "--port", "0", "--instance", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                lines = []
                for line in process.stdout:
                    lines.append(line)
                    if line.startswith("listening on "):
                        break
                assert any(f"instance {url}: not up yet" in line for line in lines)
                with pytest.raises(urllib.error.HTTPError, match="503"):
                    urllib.request.urlopen(lines[-1].split()[-1] + "/health", timeout=10)
                process.send_signal(number)
                out, err = process.communicate(timeout=20)
            finally:
                process.kill()
    assert (process.returncode, out) == (0, "stopping\n"), err


def test_the_official_client() -> None:
    openai = pytest.importorskip("openai")

    async def scene() -> None:
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

    run(scene())
