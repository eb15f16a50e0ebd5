"""A response that was cut looks like one that was not, or its call says that it cannot.

Requests with any fields go through a gateway to simulated servers that apply the fields as vLLM
does: to each request, so that a response that goes on as another request is easily another. Weight
updates, segments of a policy and lost instances cut them anywhere. Each answer must equal the one
that a server gives to the same request without a gateway.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal, NamedTuple

import aiohttp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollout_sched.integrations.vllm import HttpInstance
from rollout_sched.live.requests.continuation import RESUMABLE
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.fake_instance.tokens import CHARACTERS, decode
from tests import virtual_net
from tests.integrations.gateway.data_plane.stage import Stage
from tests.integrations.gateway.scripted import Call
from tests.simulators.fake_instance.served import SPEC

#: Few words, so that stop tokens and repetitions are frequent.
WORDS = CHARACTERS._replace(words=36)

#: Virtual seconds of a token.
STEP_S = 0.01

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


class Cut(NamedTuple):
    """After so many tokens' time."""

    tokens: int
    kind: Literal["update", "lose", "break"]


class Asked(NamedTuple):
    target: str
    body: dict[str, Any]

    @property
    def sampling(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body.get("sampling_params", self.body)
        return found

    @property
    def may_differ(self) -> bool:
        """A seeded response that was cut is as random as another, but not equal to it."""
        return self.sampling["temperature"] != 0

    @property
    def names_tokens(self) -> bool:
        """A server names a part of a character by the tokens before it, if it has made them. Of a
        part within an event of several tokens the gateway does not know."""
        logprobs = self.sampling.get("logprobs")  # 0 is for the chosen token alone
        return self.body["stream"] and logprobs is not None and logprobs is not False


#: Texts of several words, some of which no response has, but parts of them.
STOPS = ["b bab", " ab ", "ab é", "€é", "céc", "a bb", "baa", "b 😀", "babzz", "a b€", "中b"]

_WORD = st.integers(WORDS.first_word, WORDS.first_word + WORDS.words - 1)
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.sampled_from([40, 40, 30, 20, 10, 2, 1]),
    "min_tokens": st.integers(0, 30),
    "stop": st.lists(st.sampled_from(STOPS), min_size=1, max_size=2),
    "include_stop_str_in_output": st.booleans(),
    "stop_token_ids": st.lists(_WORD | st.just(WORDS.end_of_thought), max_size=4),
    "ignore_eos": st.booleans(),
    "bad_words": st.lists(
        st.sampled_from(["ab ", "bab", "baba", "€", "b"]), min_size=1, max_size=2
    ),
    "presence_penalty": st.sampled_from([0, 0.5]),
    "repetition_penalty": st.sampled_from([1.0, 1.5]),
    "logit_bias": st.dictionaries(_WORD.map(str), st.sampled_from([-100.0, -1.0, 1.0]), max_size=9),
    # Words of letters alone: parts of characters in any order would be no text.
    "allowed_token_ids": st.lists(
        _WORD.filter(lambda word: decode([word], WORDS).isascii()), min_size=1, max_size=9
    ),
}
OPENAI = {
    "structured_outputs": st.just({"choice": ["positive", "negative"]}),
    "response_format": st.sampled_from(
        [{"type": kind} for kind in ("json_object", "json_object", "text")]
    ),
    "truncate_prompt_tokens": st.sampled_from([-1, 100]),
    "return_token_ids": st.booleans(),
    "unheard_of": st.integers(0, 1),
}
OF = {
    COMPLETIONS: {"echo": st.booleans(), "logprobs": st.integers(0, 1)},
    CHAT: {"logprobs": st.booleans()},
    GENERATE: {"logprobs": st.integers(0, 1)},
}


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    target = draw(st.sampled_from([COMPLETIONS, CHAT, GENERATE]))
    common = SAMPLING | OF[target] | (OPENAI if target != GENERATE else {})
    if draw(st.booleans()):  # most combinations of all could not go on
        common = {name: of for name, of in common.items() if name in RESUMABLE}
    names = draw(st.sets(st.sampled_from(sorted(common)), max_size=draw(st.sampled_from([1, 5]))))
    further = st.sampled_from([(), ("logprobs",), ("stop",), ("bad_words",)])
    names |= {"max_tokens", *draw(further)}
    common |= {name: SAMPLING[name] for name in ("stop", "bad_words")}
    sampling = {name: draw(common[name]) for name in sorted(names)}
    if "bad_words" in names:
        sampling["return_token_ids"] = True  # another token may have the same text
    sampling["temperature"] = draw(st.sampled_from([0, 0, 0, 1.0]))
    if sampling["temperature"]:
        sampling["seed"] = draw(st.integers(0, 99))
    body: dict[str, Any] = {"stream": draw(st.booleans())}
    if body["stream"]:
        body["stream_options"] = {"include_usage": draw(st.booleans())}
    elif draw(st.booleans()):
        sampling["prompt_logprobs"] = 1
    prompt = "Tell me about it: " + draw(st.text("ab é😀", max_size=12))
    if target == GENERATE:
        return Asked(target, {**body, "token_ids": [*prompt.encode()], "sampling_params": sampling})
    if target == CHAT:
        said = draw(st.sampled_from([prompt, 'call add {"a": 1}', [IMAGE]]))
        if "call" in said:
            body["tools"] = [TOOL]
        return Asked(target, {**body, **sampling, "messages": [{"role": "user", "content": said}]})
    # Of ids the gateway does not know the text, which alone tells a repetition in a short answer.
    return Asked(target, {**body, **sampling, "prompt": prompt})


class World(NamedTuple):
    stage: Stage
    servers: list[FakeServer]
    session: aiohttp.ClientSession
    url: str

    async def cut(self, cut: Cut, number: int) -> None:
        name = f"i{number % 2}"
        match cut.kind:
            case "update":
                self.stage.driver.publish(number + 1, load)
            case "lose":
                self.stage.driver.fleet.lose(name, "it is gone")
            case "break":
                self.servers[number % 2]._hang_up_all()


async def load(client: Any, version: int) -> None:
    """New weights are loaded at once, and the responses to them are the same."""


@asynccontextmanager
async def world(
    segment: int, unresumable: str, *, thinks: bool, interval: int
) -> AsyncIterator[World]:
    """A gateway before three servers, and a fourth without one."""
    settings = EngineSettings(
        SPEC,
        speed=1 / STEP_S,
        median_tokens=25,
        stream_interval=interval,
        vocabulary=WORDS._replace(thinks=thinks),
        weight_version="0",
        prompt_details=True,
    )
    servers = [FakeServer(settings) for _ in range(4)]
    interruption = {
        "use": "partial",
        "kv": "recompute",
        "at_update": "resubmit",
        "unresumable": unresumable,
        "segment_tokens": segment,
        "segment": "chunk",
    }
    roles = {"batching": "fully_async", "freshness": "unbounded", "interruption": interruption}
    async with AsyncExitStack() as stack:
        urls = []
        for server in servers:
            urls.append(f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}")
            stack.push_async_callback(server.close)
        clients: list[Any] = [HttpInstance(url, name=f"i{n}") for n, url in enumerate(urls[:3])]
        stage = await stack.enter_async_context(Stage(*clients, **roles))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield World(stage, servers, session, urls[3])


async def answered(world: World, asked: Asked) -> tuple[int, bytes]:
    async with world.session.post(world.url + asked.target, json=asked.body) as response:
        return response.status, await response.read()


CANNOT = "it cannot be resumed"


class Answer(NamedTuple):
    """What an answer says, whole or streamed, without what differs from answer to answer."""

    error: str
    said: dict[str, Any]


def read(asked: Asked, status: int, data: bytes) -> Answer:
    if status != 200:
        return Answer(f"status {status}", {})
    if not asked.body["stream"]:
        return Answer("", whole(asked, json.loads(data)))
    parts = [part for part in data.split(b"\n\n") if part and part[:1] != b":"]
    *events, last = [part.removeprefix(b"data: ") for part in parts]
    if last != b"[DONE]":
        message = json.loads(last)["error"]["message"]
        error = CANNOT if "cannot be resumed" in message else message
        return Answer(error, joined(asked, [json.loads(event) for event in events]))
    return Answer("", joined(asked, [json.loads(event) for event in events]))


OF_ONE_ANSWER = ("id", "request_id", "created", "rollout_sched")


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Which tokens are cached, depends on what came before: of the prompt, all but the last one."""
    cached = (usage.pop("prompt_tokens_details", None) or {}).get("cached_tokens")
    assert cached is None or 0 <= cached < usage["prompt_tokens"]
    return {**usage, "cached tokens": cached is not None}


def is_beginning(found: Answer, true: Answer) -> bool:
    """Whether it is a stream that ended with the stated error, and equals another up to there."""
    return found.error == CANNOT and all(
        true.said[name][: len(found.said[name])] == found.said[name]
        for name in ("text", "reasoning", "ids", "logprobs")
    )


def forget_cached_tokens(*answers: Answer) -> None:
    for answer in answers:
        answer.said.get("usage", {}).pop("cached tokens", None)


def whole(asked: Asked, answer: dict[str, Any]) -> dict[str, Any]:
    said = {name: value for name, value in answer.items() if name not in OF_ONE_ANSWER}
    said["usage"] = counts(said["usage"])
    for choice in said["choices"]:
        choice.pop("weight_versions", None)
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            call.pop("id")
        if asked.target == GENERATE:
            in_one_spelling(choice["logprobs"])
    return {name: value for name, value in said.items() if value is not None}


def in_one_spelling(logprobs: Any) -> None:
    """The gateway also names the tokens of this endpoint as vLLM did before 0.32."""
    for item in (logprobs or {}).get("content", ()):
        for one in (item, *item["top_logprobs"]):
            one.pop("token", None)


def joined(asked: Asked, events: list[Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"text": "", "reasoning": "", "ids": [], "logprobs": [], "calls": []}
    for event in events:
        if event.get("usage") and asked.body["stream_options"]["include_usage"]:
            said["usage"] = counts(event["usage"])
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            said["text"] += choice.get("text") or delta.get("content") or ""
            said["reasoning"] += delta.get("reasoning") or ""
            said["calls"] += [call["function"] for call in delta.get("tool_calls") or ()]
            if asked.sampling.get("return_token_ids") or asked.target == GENERATE:
                said["ids"] += choice.get("token_ids") or []
            told = choice.get("logprobs") or {}
            if asked.target == GENERATE:
                in_one_spelling(told)
            lists = [told.get(name, []) for name in ("tokens", "token_logprobs", "text_offset")]
            said["logprobs"] += told.get("content") or [*zip(*lists, strict=True)]
            for name in ("finish_reason", "stop_reason"):
                if choice.get(name) is not None:
                    assert name not in said
                    said[name] = choice[name]
    return said


async def through(world: World, asked: list[Asked], cuts: list[Cut]) -> list[Answer]:
    json_type = {"content_type": "application/json"}
    calls: list[Call] = [world.stage.call(one.body, one.target, **json_type) for one in asked]
    for number, cut in enumerate(cuts):
        await asyncio.sleep(cut.tokens * STEP_S)
        await world.cut(cut, number)
    async with asyncio.timeout(600):
        await asyncio.gather(*[call.over.wait() for call in calls])
    return [read(one, call.status, call.data) for one, call in zip(asked, calls, strict=True)]


CUTS = st.lists(
    st.builds(Cut, st.integers(0, 25), st.sampled_from(["update", "update", "lose", "break"])),
    max_size=3,
)


@settings(max_examples=150, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    asked=st.lists(requests(), min_size=2, max_size=6),
    cuts=CUTS,
    segment=st.sampled_from([4, 7, 0]),  # the words come by threes
    unresumable=st.sampled_from(["finish", "start_over"]),
    thinks=st.booleans(),
    interval=st.sampled_from([1, 1, 2, 4]),
)
def test_an_answer_that_was_cut_equals_one_that_was_not(
    asked: list[Asked],
    cuts: list[Cut],
    segment: int,
    unresumable: str,
    thinks: bool,
    interval: int,
) -> None:
    async def scene() -> list[tuple[Asked, Answer, Answer]]:
        async with world(segment, unresumable, thinks=thinks, interval=interval) as here:
            own = [read(one, *await answered(here, one)) for one in asked]
            ours = await through(here, asked, cuts)
        return list(zip(asked, own, ours, strict=True))

    asked = [one for one in asked if interval == 1 or not one.names_tokens]
    for one, true, found in virtual_net.run(scene()):
        if one.body["stream"] and any(cut.kind != "update" for cut in cuts):
            forget_cached_tokens(true, found)  # the first attempt's usage has not come
        if not (cuts or segment):
            assert found == true, one
        elif one.may_differ:
            assert found.error in (CANNOT, true.error), one
        else:
            assert found == true or is_beginning(found, true), one
