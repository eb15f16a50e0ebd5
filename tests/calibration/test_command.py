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

import msgspec
import pytest
from aiohttp import web

from rollout_sched.calibration.bursts import Room
from rollout_sched.calibration.calibration import Calibration
from rollout_sched.calibration.command import scenario_text
from rollout_sched.cli import main
from rollout_sched.integrations.vllm import EngineLimits, metrics_text
from rollout_sched.integrations.vllm.protocol import endpoints as gauges
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.instance.cost_fit import Fit
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec, Speculation
from rollout_sched.simulators.instance.step_time import StepTime
from rollout_sched.simulators.replay.links import Links
from rollout_sched.simulators.replay.scenario import Scenario, load_scenario, parse_scenario

#: Steps long enough that what a busy machine adds to a burst is little beside them.
COST = CostModel(step_s=4e-3, weights_s=8e-3, token_s=30e-6, sequence_s=0.4e-3, context_s=1e-6)
SPEC = InstanceSpec(COST, 512, 16, 8, 2048, 1024)

#: Tokens of which a calibration of that server has measured enough to say something.
ENOUGH = 15_000


@contextmanager
def serving(
    *, spec: InstanceSpec = SPEC, api_key: str = "", without: str = "", speed: float = 1.0
) -> Iterator[str]:
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
        server = FakeServer(EngineSettings(spec, update_s=0.05, speed=speed), api_key=api_key)
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
    """Over real sockets, where a busy machine may add any time to a step, and never takes any away.
    In virtual time the steps are foretold within 2 % (test_calibration.py)."""
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
    assert found.weights.seconds >= 0.05
    for sequences, context in ((1, 64), (8, 4000)):
        step = (sequences, sequences, context, 0.0, 0)
        assert StepTime(found.cost).step(*step) > 0.5 * StepTime(COST).step(*step)
    assert main(["scenario", "check", str(out)]) == 0


def test_drafts_of_a_server_are_added_to_its_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Acceptance, which is counted, within 2 %; the cost of drafts is a time, and this machine
    busy. The server has half of the KV cache that it had without drafts."""
    base, out = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text(written(room=Room(8, 16384, 1024), fit=Fit(COST, 0.0, [0.0]))[0])
    drafts = Speculation(4, 0.7, schedule="always", draft_share=0.1)
    arguments = ["--minutes", "0.1", "--base", str(base), "--out", str(out)]
    with serving(spec=msgspec.structs.replace(SPEC, speculation=drafts)) as url:
        assert main(["calibrate", url, "--minutes", "0.02"]) == 2
        assert "--base FILE" in capsys.readouterr().err
        assert main(["calibrate", url, *arguments]) == 0
    found = load_scenario(str(out))
    assert found.speculation is not None
    assert found.speculation.acceptance == pytest.approx(0.7, rel=0.02)
    assert found.speculation.kv_share == 0.5
    assert found.cost == load_scenario(str(base)).cost
    assert main(["calibrate", url, "--base", str(out)]) == 2
    assert "remove [speculation]" in capsys.readouterr().err


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
def test_missing_figures_are_named_with_their_flag(
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


FOUND = Calibration(
    model='a "model" \\ of\nmine',
    instances=2,
    room=Room(64, 131072, 8192),
    limits=EngineLimits(32, None, None, "0.32.0"),
    fit=Fit(CostModel(1.23456e-3, 0.0, 11.7e-6, context_s=1e-7), 2.5e-3, [0.01, -0.05]),
    bursts=28,
    measured=84,
    spread=0.012,
    disturbed=3,
    context=40_000,
    prefix_caching=None,
    writing_s=15e-6,
)


def written(**changes: object) -> tuple[str, Scenario]:
    found = msgspec.structs.replace(FOUND, **changes)
    text = scenario_text(found, "http://gpu-1:8000", "today")
    return text, parse_scenario("mine", tomllib.loads(text))


def test_it_is_a_scenario_with_what_was_found() -> None:
    _, scenario = written(prefix_caching=False, pause_s=0.002, reload_s=0.5)
    assert scenario.fleet.instances == 2
    assert (scenario.fleet.kv_tokens, scenario.fleet.block_size) == (131072, 32)
    assert scenario.fleet.prefix_caching is False
    assert scenario.cost.step_s == 1.235e-3
    assert scenario.weights.seconds == 0.5
    assert 'a "model" \\ of mine' in scenario.about


@pytest.mark.parametrize(
    "says",
    [
        "Fit error 3.0% mean, 5.0% max, over 28 bursts of requests measured 84 times",
        "spread 1.2%",
        "up to 40,000 tokens of context",
        "not in the scenario: 2.50 ms per call, 15.0 us per answer token",
        "3 measurements were thrown away",
        "max_num_batched_tokens: vLLM's default",
        "prefix_caching: a repeated prompt",
        "step_s and weights_s separately",
        "attention_s: too small to measure",
        "the trainer, which is a guess",
        "--weights CHECKPOINT",
        "the time of a pause: the server offers none",
    ],
)
def test_undetermined_figures_are_named(says: str) -> None:
    text, _ = written()
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert says in header


def test_commented_links_parse_once_uncommented() -> None:
    text, scenario = written()
    assert scenario.links is None
    kept, links = text.split("# [links]")
    put_in = kept + "[links]" + links.replace("# ", "")
    assert parse_scenario("mine", tomllib.loads(put_in)).links == Links(2, 1.25e-3, token_s=15e-6)


def test_the_time_of_new_weights_that_is_not_known_is_marked_where_it_stands() -> None:
    said = "put in your own value"
    unknown, known = written(pause_s=0.1)[0], written(pause_s=0.1, reload_s=1.0)[0]
    assert said in unknown.split("[weights]")[1]
    assert said not in known.split("[weights]")[1]


def test_determined_figures_are_not_called_undetermined() -> None:
    limits = EngineLimits(32, True, 2048, "0.32.0")
    cost = CostModel(1e-3, 1e-3, 1e-5, 1.6, 1e-5, 1e-7, 1e-9, 1e-4, 1e-3)
    text, _ = written(
        limits=limits,
        fit=Fit(cost, 0.0, [0.0]),
        prefix_caching=True,
        pause_s=0.1,
        reload_s=1.0,
        disturbed=0,
    )
    assert text.count("Not determined") == 1, "the trainer"
    assert "thrown away" not in text


def test_early_end_is_noted() -> None:
    assert "stopped early" in written(whole=False)[0]
    assert "stopped early" not in written()[0]
