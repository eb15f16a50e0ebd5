"""No key leaves the gateway: it is in no answer, log line, metric, journal or store. And no
content of a request or an answer is in a log line."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
from contextlib import AsyncExitStack, suppress
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from rollout_sched.client import Applied, Prompt, Reload, RolloutScheduler
from rollout_sched.core.errors import RolloutError
from rollout_sched.integrations.gateway.control_plane import app as public
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.process import JsonLines, TextLines
from rollout_sched.simulators.fake_instance import server
from rollout_sched.simulators.fake_instance.engine import MODEL, EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from tests.integrations.faults.fleet import GREEDY, SETTINGS, house
from tests.simulators.fake_instance.served import SPEC

WHOSE = ("client", "trainer", "admin", "common", "own", "added", "mistaken", "wrong")
SECRETS = {name: f"{name}-{base64.b16encode(name.encode() * 4).decode()}" for name in WHOSE}

#: A prompt whose name would be found in what is written, if all of that is looked at.
SEEN = "a-name-that-is-written"

PLACES = [
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/admin/live"),
    ("GET", "/admin/state"),
    ("GET", "/admin/instances"),
    ("GET", "/workers"),
    ("GET", "/v1/rl/workers"),
    ("GET", "/v1/models"),
    ("GET", "/rollout/v1/state"),
    ("GET", "/version"),
]


class Life:
    """A gateway with keys of every kind before servers that ask for theirs; all that is said."""

    def __init__(self, folder: Path, servers: dict[str, str]) -> None:
        self.folder = folder
        self.servers = servers  # URLs, by whose key they ask for
        self.told: list[str] = []
        self.session: aiohttp.ClientSession
        self.service: Service

    def options(self) -> Options:
        return Options(
            policy="partial_rollout",
            instances=[self.servers["common"], self.servers["own"]],
            port=0,
            prompts_per_step=1,
            stream_every=4,
            grace_s=0.1,
            store=self.folder / "written" / "store",
            access_log=True,
            length_history=self.folder / "written" / "lengths",
            api_key_file=self._file("client", SECRETS["client"]),
            trainer_key_file=self._file("trainer", SECRETS["trainer"]),
            admin_key_file=self._file("admin", SECRETS["admin"]),
            instance_api_key_file=self._file(
                "instances", f"{SECRETS['common']}\n{self.servers['own']} {SECRETS['own']}"
            ),
            allow_instances=["http://127.0.0.1:*"],
            weights_roots=[self.folder / "weights"],
        )

    def _file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(f"{text}\n")
        return path

    async def open(self) -> None:
        self.service = Service(self.options(), self.told.append, settings=SETTINGS)
        await self.service.open()
        self.session = aiohttp.ClientSession(self.service.url)

    async def close(self) -> None:
        await self.session.close()
        await self.service.close()

    async def ask(self, who: str, method: str, path: str, body: Any = None) -> int:
        headers = {"Authorization": f"Bearer {SECRETS[who]}"} if who else {}
        async with self.session.request(method, path, json=body, headers=headers) as response:
            self.told += [f"{name}: {value}" for name, value in response.headers.items()]
            self.told.append((await response.read()).decode(errors="replace"))
            return response.status

    def written(self) -> list[bytes]:
        return [p.read_bytes() for p in (self.folder / "written").rglob("*") if p.is_file()]


async def train(life: Life, uid: str, version: int) -> None:
    """A step as a trainer has it, with a mistake."""
    client = RolloutScheduler.connect(life.service.url, key=SECRETS["trainer"])
    async with client as rollouts:
        await rollouts.submit([Prompt(uid, [1, 2, 3], 2, 9, dict(GREEDY))])
        assert await rollouts.next_batch()
        for mistaken in (Reload("/etc/{version}"), Reload(str(life.folder / "weights" / "none"))):
            with pytest.raises(RolloutError) as error:
                await rollouts.publish_weights(version, mistaken)
            life.told.append(str(error.value))
        await rollouts.publish_weights(version, Applied())
        life.told.append(repr(await rollouts.state()))


async def knock(life: Life) -> None:
    """Every door with every key, rightly and wrongly, and with it where it does not belong."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for who in ("", *SECRETS):
        for method, path in PLACES:
            await life.ask(who, method, path)
        await life.ask(who, "POST", "/v1/chat/completions", chat)
        await life.ask(who, "POST", "/v1/completions", {"prompt": 7})
        await life.ask(who, "POST", f"/v1/completions?key={SECRETS[who or 'wrong']}", {})
        await life.ask(who, "POST", "/rollout/v1/groups", {"not": "a list"})
        await life.ask(who, "POST", "/unheard_of", {})
        await life.ask("client", "GET", f"/v1/models?api_key={SECRETS[who or 'wrong']}")
    assert await life.ask("client", "POST", "/v1/chat/completions", chat) == 200
    assert await life.ask("wrong", "POST", "/v1/chat/completions", chat) == 401
    added = {"url": life.servers["added"], "api_key": SECRETS["added"]}
    assert await life.ask("admin", "POST", "/workers", added) == 201
    for path in ("/workers", "/admin/instances"):
        with_wrong = {"url": life.servers["other"], "api_key": SECRETS["mistaken"]}
        await life.ask("admin", "POST", path, with_wrong)
        for url in ("http://127.0.0.1:1", "http://elsewhere:1", "http://a:b@c", "nonsense"):
            assert await life.ask("admin", "POST", path, {**with_wrong, "url": url}) >= 400
        await life.ask("admin", "POST", path, {**with_wrong, "slots": "many"})


async def test_keys_appear_in_no_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "written").mkdir()
    (tmp_path / "weights").mkdir()
    async with AsyncExitStack() as stack:
        urls, servers = {}, {}
        for number, name in enumerate(("common", "own", "added", "other")):
            server = FakeServer(
                EngineSettings(SPEC, speed=1000.0, seed=number),
                api_key=SECRETS.get(name, "another's"),
            )
            urls[name] = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
            servers[name] = server
            stack.push_async_callback(server.close)
        life = Life(tmp_path, urls)
        for run in range(2):  # the second takes up what the first has stored
            await life.open()
            await train(life, f"{SEEN}-{run}", 2 * run + 1)
            await knock(life)
            await servers["own"].restart(0.05)
            await train(life, f"again-{run}", 2 * run + 2)
            with monkeypatch.context() as broken:
                broken.setattr(public.MetricsPage, "text", _fails)
                assert await life.ask("", "GET", "/metrics?api_key=" + SECRETS["wrong"]) == 500
            await life.close()
        fields = "\n".join(repr(vars(record)) for record in caplog.records)
        _look_through(life, caplog.text + fields)


def _fails(*about: object) -> str:
    raise RuntimeError("this was to be logged")


def _look_through(life: Life, log: str) -> None:
    written = b"\n".join(life.written())
    assert SEEN.encode() in written
    assert "this was to be logged" in log
    told = "\n".join(life.told)
    for name, secret in SECRETS.items():
        for shape in (secret, base64.b64encode(secret.encode()).decode(), secret[::-1]):
            assert shape.encode() not in written, name
            assert shape not in log, name
            assert shape not in told, name


def test_objects_with_keys_hide_them_in_their_repr(tmp_path: Path) -> None:
    """Nor does what a debugger or a careless log line makes of the objects."""
    life = Life(tmp_path, {"common": "http://127.0.0.1:1", "own": "http://127.0.0.1:2"})
    shown = repr(life.options())
    assert not any(secret in shown for secret in SECRETS.values())


# ------------------------------------------------------------------------------------------
# Contents are in no log line either: prompts, responses, and whatever an instance sends.

CONTENT = "Content-Of-A-Prompt-Or-Answer"
IDS = [31337, 31338, 31339]


def lies() -> list[tuple[int, bytes]]:
    """Answers to a call that generates, each wrong in its own way, with a status."""
    choice = {"index": 0, "finish_reason": "stop", "text": CONTENT, "token_ids": IDS}
    choice["message"] = {"role": "assistant", "content": CONTENT}
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    answer: dict[str, Any] = {"id": CONTENT, "choices": [choice], "usage": usage}
    spans = [{"version": CONTENT, "start": 0, "end": 2}]
    wrong = [
        {**answer, "choices": [{**choice, **changed}]}
        for changed in (
            {"finish_reason": {CONTENT: 1}},
            {"finish_reason": "error"},
            {"weight_versions": spans},
            {"token_ids": [CONTENT]},
            {"text": [CONTENT], "message": {"content": [CONTENT]}},
            {"delta": {"content": {CONTENT: 1}}},
            {"logprobs": {"content": [{"logprob": CONTENT}], "token_logprobs": [CONTENT]}},
            {"logprobs": {"content": CONTENT}, "message": CONTENT},
        )
    ]
    wrong += [{"error": {"message": CONTENT, "type": CONTENT}}, {CONTENT: CONTENT}]
    bodies = [json.dumps(each).encode() for each in (answer, *wrong)]
    bodies += [CONTENT.encode(), f'{{"id": "{CONTENT}'.encode(), CONTENT.encode() + b"\xff"]
    statuses = (400, 401, 403, 404, 408, 413, 422, 429, 500, 503)
    return [(200, body) for body in bodies] + [
        (status, body) for status in statuses for body in (bodies[-4], bodies[-3])
    ]


def lying(real: Any) -> Any:
    """`server.serve`, of which only every third answer is true."""
    told = cycle(lies())
    number = 0

    async def serve(request: web.Request, *rest: Any) -> web.StreamResponse:
        nonlocal number
        number += 1
        if number % 3 == 0:
            return cast(web.StreamResponse, await real(request, *rest))
        status, body = next(told)
        if b'"stream":true' in (await request.read()).replace(b" ", b"") and status == 200:
            body = b"data: %b\n\n" % body * (1 + number % 2)
        headers = {"X-Content": CONTENT, "Content-Type": "application/json"}
        return web.Response(status=status, body=body, headers=headers)

    return serve


async def ask_for_contents(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        common = {"model": MODEL, "max_tokens": 4, "user": CONTENT}
        messages = [{"role": "user", "content": CONTENT}]
        for stream in (False, True):
            for path, body in (
                ("/v1/completions", {"prompt": CONTENT, "return_token_ids": True}),
                ("/v1/chat/completions", {"messages": messages}),
                ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"n": 1}}),
                ("/v1/completions", {"prompt": [CONTENT, {CONTENT: 1}]}),
                ("/v1/chat/completions", {"messages": CONTENT}),
                ("/inference/v1/generate", {"token_ids": [CONTENT]}),
                ("/v1/embeddings", {"input": CONTENT}),
            ):
                for _ in range(8):
                    asked = {**common, **body, "stream": stream}
                    async with session.post(path, json=asked) as response:
                        await response.read()


async def train_on_contents(url: str) -> None:
    async with RolloutScheduler.connect(url) as rollouts:
        sampling = {**GREEDY, "logprobs": 0}
        prompts = [Prompt(f"g{n}", IDS, 2, 9, sampling, extra={"k": CONTENT}) for n in range(12)]
        await rollouts.submit(prompts)
        await rollouts.close_submissions()
        with suppress(RolloutError):
            async for _ in rollouts.batches():
                pass


@pytest.mark.parametrize("stream_every", [0, 2])
async def test_contents_appear_in_no_log_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream_every: int,
) -> None:
    """Whatever an instance answers, in both formats and from the lowest level on."""
    logged = io.StringIO()
    handlers = [logging.StreamHandler(logged) for _ in range(2)]
    handlers[0].setFormatter(TextLines())
    handlers[1].setFormatter(JsonLines())
    monkeypatch.setattr(logging.root, "handlers", handlers)
    caplog.set_level(logging.DEBUG)  # it also forgets what loggers know of their levels
    monkeypatch.setattr(server, "serve", lying(server.serve))
    async with house(tmp_path, stream_every=stream_every) as the:
        async with asyncio.timeout(600):
            await ask_for_contents(the.url)
            await train_on_contents(the.url)
        logging.getLogger(__name__).error("seen", exc_info=ValueError(CONTENT))
    log = logged.getvalue()
    assert "attempt" in log
    assert "ValueError" in log
    quoted = [line for line in log.splitlines() if CONTENT in line or f"{IDS}"[1:-1] in line]
    assert not quoted, quoted[:5]
