"""`rollout-sched calibrate` before simulated servers over HTTP: a file, or what to do."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from rollout_sched.cli import main
from rollout_sched.integrations.vllm import metrics_text
from rollout_sched.integrations.vllm.protocol import endpoints as gauges
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec, StepTime
from rollout_sched.simulators.replay.scenario import load_scenario

#: Steps long enough that what a busy machine adds to a burst is little beside them.
COST = CostModel(step_s=4e-3, weights_s=8e-3, token_s=30e-6, sequence_s=0.4e-3, context_s=1e-6)
SPEC = InstanceSpec(COST, 512, 16, 8, 2048, 1024)

#: Tokens of which a calibration of that server has measured enough to say something.
ENOUGH = 15_000


@contextmanager
def serving(*, api_key: str = "", without: str = "", speed: float = 1.0) -> Iterator[str]:
    """The URL of a simulated server in a thread of its own; `without` a path that answers 404."""
    urls: list[str] = []
    up, loops = threading.Event(), list[asyncio.AbstractEventLoop]()
    stop = asyncio.Event()

    @web.middleware
    async def cut(request: web.Request, handler):  # type: ignore[no-untyped-def]
        if without and request.path == without:
            raise web.HTTPNotFound
        return await handler(request)

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        server = FakeServer(EngineSettings(SPEC, update_s=0.05, speed=speed), api_key=api_key)
        server.app.middlewares.insert(0, cut)
        urls.append(f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}")
        up.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert up.wait(20)
    try:
        yield urls[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(20)


def test_a_scenario_of_a_server_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over real sockets on a busy machine: that its steps are foretold within 30 % is enough here;
    in virtual time they are within 2 % (test_calibration.py)."""
    out = tmp_path / "mine.toml"
    with serving(api_key="secret") as url:
        key = tmp_path / "key"
        key.write_text("secret\n")
        arguments = ["calibrate", url, "--minutes", "0.1", "--api-key-file", str(key)]
        assert main([*arguments, "--weights", str(tmp_path), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "fit error" in said.err
    found = load_scenario(str(out))
    fleet = found.fleet
    assert (fleet.instances, fleet.kv_tokens, fleet.block_size) == (1, 8192, 16)
    assert (fleet.max_num_seqs, fleet.max_num_batched_tokens) == (8, 2048)
    assert (fleet.max_model_len, fleet.prefix_caching) == (1024, True)
    assert 0.05 <= found.weights.seconds < 5
    for sequences, context in ((1, 64), (8, 4000)):
        step = (sequences, sequences, context, 0.0, 0)
        wanted = StepTime(COST).step(*step)
        assert StepTime(found.cost).step(*step) == pytest.approx(wanted, rel=0.3)
    assert main(["scenarios", "check", str(out)]) == 0


def test_weights_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as url:
        nowhere = str(tmp_path / "not-there")
        assert main(["calibrate", url, "--minutes", "0.02", "--weights", nowhere]) == 2
    assert "left paused" in capsys.readouterr().err


def test_an_interrupt_writes_what_is_known(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    with serving(speed=20.0) as url:
        command = [sys.executable, "-m", "rollout_sched", "calibrate", url, "--minutes", "60"]
        # A shell's background job ignores interrupts, and so would its children.
        heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            [*command, "--out", str(out)], stderr=subprocess.PIPE, text=True, preexec_fn=heard
        )
        try:
            while generated(url) < ENOUGH:
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, said
    assert load_scenario(str(out)).fleet.max_num_seqs == 8


def generated(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        return metrics_text.total(answer.read(), gauges.GENERATED_TOKENS)


def test_without_a_file_it_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(without="/server_info") as url:
        assert main(["calibrate", url, "--minutes", "0.02", "--slots", "4"]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["fleet"]["max_num_seqs"] == 4
    assert "Not determined: max_num_batched_tokens" in text


@pytest.mark.parametrize(
    ("without", "api_key", "says"),
    [
        ("/metrics", "", "without --disable-log-stats"),
        ("/server_info", "", "--slots N"),
        ("", "secret", "--api-key-file FILE"),
    ],
)
def test_what_is_missing_is_said_with_the_flag(
    capsys: pytest.CaptureFixture[str], without: str, api_key: str, says: str
) -> None:
    with serving(without=without, api_key=api_key) as url:
        assert main(["calibrate", url, "--minutes", "0.02"]) == 2
    assert says in capsys.readouterr().err


def test_a_paused_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as url:
        pause = urllib.request.Request(f"{url}/pause?mode=keep", method="POST")
        urllib.request.urlopen(pause, timeout=20).read()
        assert main(["calibrate", url, "--minutes", "0.02"]) == 2
    assert "resume it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give either the URL"),
        (["http://127.0.0.1:1", "--engine", "m"], "give either the URL"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1"),
        (["--engine", "m", "--engine-args", "{"], "invalid JSON"),
        (["--engine", "m", "--engine-args", "[]"], "a JSON object"),
        (["http://127.0.0.1:1", "--out", "/not/there/x.toml"], "does not exist"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert says in capsys.readouterr().err
