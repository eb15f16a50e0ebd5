"""The one stream that a client sees."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane.answers import read_event
from rollout_sched.integrations.gateway.data_plane.stream import EVENT_STREAM, ClientStream
from tests.integrations.gateway.scripted import chunk, compact
from tests.integrations.gateway.test_fanout import Reply


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


def test_it_begins_with_what_is_sent_first() -> None:
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
def test_what_the_first_event_does_not_say_is_said_for_it(endpoint: Any, envelope: Any) -> None:
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
