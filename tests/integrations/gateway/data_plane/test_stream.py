"""One attempt's stream: what of it the client hears, and what the scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane.answers import read_event
from rollout_sched.integrations.gateway.data_plane.stream import (
    EVENT_STREAM,
    READ_TOGETHER,
    ClientStream,
    Stream,
    StreamTokens,
)
from rollout_sched.live.ports import (
    InstanceError,
    Outcome,
)
from tests.integrations.gateway.data_plane.test_fanout import Reply
from tests.integrations.gateway.scripted import Exchange, chunk, compact

DONE = b"data: [DONE]\n\n"
USAGE = {"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


def event(fields: Any) -> bytes:
    return b"data: %b\n\n" % compact(fields)


class Watched:
    """A stream and what its client has heard."""

    def __init__(self, endpoint: Any = "completions", **terms: Any) -> None:
        self.reply = Reply()
        self.client = ClientStream(endpoint, self.reply)
        named = {"resumes": None, "segment": False, "resumable": True, "labelled": False, **terms}
        self.stream = Stream(self.client, 1, **named)
        self.stream.recognize = Exchange("ab12-1").recognize

    def hears(self, *packets: bytes) -> bool:
        return [self.stream.receive(packet) for packet in packets][-1]

    @property
    def heard(self) -> list[Any]:
        events = b"".join(self.reply.said).split(b"\n\n")
        return [json.loads(told.removeprefix(b"data: ")) for told in events if told]

    @property
    def ids(self) -> list[int]:
        return [i for told in self.heard for c in told["choices"] for i in c.get("token_ids", [])]


STREAM = event(chunk([1])) + event(chunk([2, 3])) + event(chunk([4])) + event(chunk([5], "stop"))


@pytest.mark.parametrize("size", [1, 2, 17, 100, 10_000])
def test_all_events_but_the_end_pass_for_any_chunk_size(size: int) -> None:
    the = Watched()
    whole = STREAM + event(USAGE) + DONE
    done = the.hears(*(whole[at : at + size] for at in range(0, len(whole), size)))
    assert done
    assert the.ids == [1, 2, 3, 4]
    assert json.loads(the.stream.end.event)["choices"][0]["token_ids"] == [5]
    assert json.loads(the.stream.end.usage) == USAGE
    assert the.stream.outcome() == Outcome(5, "stop", (), None)
    assert the.stream.tokens.to_go_on_from() == [1, 2, 3, 4, 5]


def test_plain_vllm_events_pass_unread_and_uncounted() -> None:
    the = Watched()
    the.hears(event(chunk([1])))
    odd = event(chunk([2]))[:-4] + b' , "x":1}\n\n'
    the.hears(odd)
    assert the.reply.said[1] is odd
    assert (the.stream.tokens.count, len(the.stream.tokens.unread)) == (1, 1)


def test_an_empty_abort_produces_no_event() -> None:
    the = Watched()
    the.hears(event(chunk([1])), event({**chunk([], "abort")}))
    assert len(the.heard) == 1


def test_a_length_that_the_client_asked_for_is_its_end() -> None:
    the = Watched(segment=False)
    the.hears(event(chunk([1], "length")))
    assert json.loads(the.stream.end.event)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("reason", ["repetition", "tool_calls"])
def test_every_other_reason_is_a_stop_that_the_client_hears_as_it_is(reason: str) -> None:
    the = Watched()
    the.hears(event(chunk([1], reason)))
    assert the.stream.outcome().finish == "stop"
    assert json.loads(the.stream.end.event)["choices"][0]["finish_reason"] == reason


def test_a_stream_that_only_says_done_has_stopped() -> None:
    the = Watched()
    assert the.hears(event(chunk([1])) + DONE)
    assert the.stream.outcome() == Outcome(1, "stop", (), None)
    assert the.stream.end.event == b""


def test_a_stream_has_not_ended_without_its_last_event() -> None:
    the = Watched()
    the.hears(event(chunk([1])))
    with pytest.raises(InstanceError, match="without a finish_reason"):
        the.stream.outcome()


def versions(*labels: str) -> list[dict[str, Any]]:
    return [{"version": label, "start": n, "end": n + 1} for n, label in enumerate(labels)]


def test_the_end_says_which_weights_made_what() -> None:
    the = Watched(labelled=True)
    the.hears(event(chunk([1])), event(chunk([2], "stop", weight_versions=versions("3", "4"))))
    assert the.stream.outcome().spans == ((3, 1), (4, 1))


def test_a_later_attempt_speaks_as_the_first_did() -> None:
    the = Watched("chat", resumes=2)
    the.client.envelope = {"id": "chatcmpl-1", "object": "chat.completion.chunk"}
    end = chunk([4], "stop")
    the.hears(event({**chunk([3]), "prompt_token_ids": [1]}), event(end), event(USAGE), DONE)
    (told,) = the.heard
    assert (told["id"], told["object"]) == ("chatcmpl-1", "chat.completion.chunk")
    assert told["choices"][0]["delta"] == {"content": "w3 "}
    assert "prompt_token_ids" not in told
    assert json.loads(the.stream.end.usage)["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
    }


def test_a_later_attempt_is_read_to_the_last_event() -> None:
    """What passes unread would pass in another's name."""
    the = Watched(resumes=2)
    the.client.envelope = {"id": "first"}
    the.hears(event(chunk([3])), event(chunk([4])))
    assert [told["id"] for told in the.heard] == ["first", "first"]
    assert the.stream.tokens.unread == []


def test_an_event_that_cannot_be_translated_is_no_event() -> None:
    the = Watched(resumes=2)
    with pytest.raises(InstanceError, match="is not valid"):
        the.hears(b'data: {"choices":[{"token_ids":[1]}],"usage":{"prompt_tokens":null}}\n\n')


EVENT = b'data: {"choices":[{"token_ids":[%b]}]}\n\n'


def test_a_stream_without_events_has_no_tokens() -> None:
    tokens = StreamTokens(1)
    assert (tokens.count, tokens.to_go_on_from()) == (0, [])


def test_parsed_tokens_count_at_once() -> None:
    tokens = StreamTokens(1)
    tokens.add(b"1,2", speaks=True)
    tokens.add(b"", speaks=False)
    tokens.add(b"3", speaks=False)
    assert (tokens.count, tokens.to_go_on_from(), tokens.events) == (3, [1, 2, 3], 0)


def test_an_event_without_ids_is_a_token_that_cannot_be_resumed() -> None:
    tokens = StreamTokens(1)
    tokens.add(b"", speaks=True)
    assert (tokens.count, tokens.events, tokens.to_go_on_from()) == (1, 1, [])


def test_unread_tokens_are_counted_on_demand() -> None:
    tokens = StreamTokens(5)
    tokens.add_unread(EVENT % b"1" + EVENT % b"2,3")
    assert tokens.count == 0
    tokens.read_up()
    tokens.read_up()
    assert (tokens.count, tokens.to_go_on_from(), tokens.unread) == (3, [1, 2, 3], [])


@pytest.mark.parametrize("attempt", [0, 1, 31, 32, 1000])
def test_unread_tokens_are_counted_above_a_limit(attempt: int) -> None:
    tokens = StreamTokens(attempt)
    limit = 0
    for number in range(3 * READ_TOGETHER):
        tokens.add_unread(EVENT % b"7")
        limit = max(limit, len(tokens.unread))
        assert tokens.count + len(tokens.unread) == number + 1
    assert limit < READ_TOGETHER
    assert tokens.count >= 2 * READ_TOGETHER


def test_streams_that_began_together_count_at_different_times() -> None:
    streams = [StreamTokens(attempt) for attempt in range(READ_TOGETHER)]
    counted = []
    for _ in range(READ_TOGETHER):
        before = [stream.count for stream in streams]
        for stream in streams:
            stream.add_unread(EVENT % b"7")
        counted.append(sum(s.count > b for s, b in zip(streams, before, strict=True)))
    assert max(counted) <= 2


@pytest.mark.parametrize(
    ("data", "ids", "events"),
    [
        (b'{"token_ids" : [1, 2]}', [1, 2], 0),
        (b'{"token_ids":[1]}{"token_ids" :[2]}', [1, 2], 0),
        (EVENT % b"" + EVENT % b"1, 2", [1, 2], 0),
        (EVENT % b"1" + b'data: {"choices":[{"token_ids" : [],"text":"a"}]}\n\n', [1], 1),
        (b'data: {"choices":[{"token_ids":[],"delta":{"role":"assistant"}}]}\n\n', [], 0),
        (b'data: {"choices":[{"token_ids":[]}\n\n', [], 1),
        (b'{"token_ids":["x"]}', [], 1),
        (b'{"choices":[]}{"choices":[]}', [], 2),
    ],
)
def test_token_ids_are_read_in_any_spacing(data: bytes, ids: list[int], events: int) -> None:
    tokens = StreamTokens(1)
    tokens.add_unread(data)
    tokens.read_up()
    assert (tokens.to_go_on_from(), tokens.events) == (ids, events)


class Begun(Reply):
    def __init__(self) -> None:
        super().__init__()
        self.headers: list[Any] = []

    def begin(self, headers: Any) -> Any:
        self.headers.append(headers)
        return super().begin(headers)


def learn(client: ClientStream, fields: Any) -> None:
    event = read_event(compact(fields))
    client.learn(event, event.choices[0] if event.choices else None)


def test_a_stream_begins_with_its_prefix() -> None:
    reply = Begun()
    client = ClientStream("completions", reply)
    assert not client.begun
    client.send(b"1")
    client.send(b"2")
    assert client.begun
    assert (reply.headers, reply.said) == ([[EVENT_STREAM]], [b"1", b"2"])


@pytest.mark.parametrize(("endpoint", "named"), [("generate", True), ("chat", False)])
def test_log_probs_of_tokens_name_them_in_both_ways(endpoint: Any, named: bool) -> None:
    reply = Begun()
    ClientStream(endpoint, reply).send(b'data: {"token_id":5,"logprob":-1}\n\n')
    assert (b'"token":"token_id:5"' in reply.said[0]) is named


def test_the_first_event_names_the_response_for_good() -> None:
    client = ClientStream("completions", Begun())
    assert client.envelope is None
    learn(client, {**chunk([1]), "id": "first", "created": 7, "model": "tiny"})
    learn(client, {**chunk([2]), "id": "second", "model": "other"})
    assert client.envelope == {
        "id": "first",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
    }


@pytest.mark.parametrize(
    ("endpoint", "envelope"),
    [
        ("chat", {"id": "", "object": "chat.completion.chunk", "created": 0, "model": ""}),
        ("generate", {"request_id": "", "model": "", "created": 0}),
    ],
)
def test_fields_missing_from_the_first_event_are_filled_in(endpoint: Any, envelope: Any) -> None:
    client = ClientStream(endpoint, Begun())
    learn(client, {"choices": []})
    assert client.envelope == envelope


def test_an_empty_prompt_is_not_believed() -> None:
    client = ClientStream("chat", Begun())
    learn(client, {**chunk([1]), "prompt_token_ids": []})
    learn(client, chunk([1], prompt_token_ids=[]))
    assert client.prompt_ids == b""
    learn(client, chunk([2], prompt_token_ids=[7]))
    assert client.prompt_ids == b"[7]"


def test_the_prompts_ids_are_learned_from_whichever_event_tells_them() -> None:
    client = ClientStream("completions", Begun())
    learn(client, chunk([1]))
    assert client.prompt_ids == b""
    learn(client, chunk([2], prompt_token_ids=[7, 8]))
    learn(client, {**chunk([3]), "prompt_token_ids": [9]})
    assert client.prompt_ids == b"[7,8]"
