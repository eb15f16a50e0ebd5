"""What an attempt of a client's call says to an instance, and what is added to the answer."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.model import DeliveredSample, Segment
from rollout_sched.integrations.gateway.data_plane import body as envelopes
from rollout_sched.integrations.gateway.data_plane.body import ClientBody, split
from rollout_sched.integrations.gateway.data_plane.call import (
    Call,
    Upstream,
    UpstreamCall,
    added,
    error_body,
    weight_versions,
    with_added,
)
from rollout_sched.integrations.gateway.data_plane.client_request import ClientRequest
from rollout_sched.integrations.gateway.data_plane.resume import ResponsePart
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.integrations.vllm.protocol.endpoints import ENDPOINTS
from rollout_sched.live.ports import RequestRejected
from tests.integrations.gateway.scripted import Instance

PROMPT = [1, 2, 3]


class Nobody:
    """A receiver that hears nothing."""

    def on_head(self, status: int, headers: Any) -> None: ...
    def on_data(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_error(self, error: Exception) -> None: ...


def a_call(
    fields: Any,
    path: bytes = b"/v1/completions",
    *,
    index: int = 0,
    asks_ids: bool = False,
    request_id: bytes = b"",
    header_lines: bytes = b"",
) -> Call:
    raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    endpoint = ENDPOINTS[path.partition(b"?")[0]]
    envelope = envelopes.read(raw, endpoint)
    body = ClientBody(raw, nested=endpoint == "generate")
    one = split(body, endpoint, envelope, 16)[index]
    request = ClientRequest(endpoint, path, header_lines, request_id, body, envelope)
    return Call(request, one, asks_ids=asks_ids, parsing={})


def dispatch(limit: int = 10, *, salt: int = 3, made: int = 0) -> Dispatch:
    return Dispatch("r", 1, "i0", len(PROMPT), limit, salt, made)


def sent(asked: tuple[bytes, bytes]) -> tuple[bytes, dict[str, Any]]:
    path, body = asked
    return path, json.loads(body)


class TestTheFirstAttempt:
    def test_first_attempt_is_the_clients_body_with_a_versioned_salt(self) -> None:
        call = a_call(b'{"prompt": [1, 2, 3], "temperature": 0.10}')
        path, body = call.first(dispatch(), 10)
        assert path == b"/v1/completions"
        assert body == b'{"cache_salt":"v3","prompt": [1, 2, 3], "temperature": 0.10}'

    def test_keeps_the_query_and_the_clients_own_salt_apart(self) -> None:
        call = a_call({"prompt": "a", "cache_salt": "mine"}, b"/v1/completions?x=1")
        path, body = sent(call.first(dispatch(), 10))
        assert (path, body["cache_salt"]) == (b"/v1/completions?x=1", "mine/v3")

    @pytest.mark.parametrize(("fields", "asks"), [({}, True), ({"return_token_ids": False}, True)])
    def test_asks_for_ids_to_go_on_from_whatever_the_client_wants(
        self, fields: dict[str, Any], asks: bool
    ) -> None:
        call = a_call({"prompt": "a", **fields}, asks_ids=True)
        assert sent(call.first(dispatch(), 10))[1]["return_token_ids"] is asks
        assert not call.keep_ids

    def test_leaves_the_ids_to_the_client_where_nothing_goes_on(self) -> None:
        body = sent(a_call({"prompt": "a"}).first(dispatch(), 10))[1]
        assert "return_token_ids" not in body

    @pytest.mark.parametrize(
        ("path", "fields", "limited"),
        [
            (b"/v1/completions", {"prompt": "a", "max_tokens": 99}, {"max_tokens": 7}),
            (
                b"/v1/chat/completions",
                {"messages": [], "max_completion_tokens": 99},
                {"max_completion_tokens": 7},
            ),
            (b"/v1/chat/completions", {"messages": [], "max_tokens": 99}, {"max_tokens": 7}),
            (
                b"/inference/v1/generate",
                {"token_ids": PROMPT, "sampling_params": {"max_tokens": 99, "top_k": 2}},
                {"sampling_params": {"max_tokens": 7, "top_k": 2}},
            ),
        ],
    )
    def test_a_segments_limit_needs_the_clients_limit(
        self, path: bytes, fields: dict[str, Any], limited: dict[str, Any]
    ) -> None:
        body = sent(a_call(fields, path).first(dispatch(7), 99))[1]
        assert body == {**fields, **limited, "cache_salt": "v3"}

    def test_each_sample_has_its_own_prompt_and_seed(self) -> None:
        fields = {"prompt": ["a", "b"], "n": 2, "seed": 5}
        bodies = [sent(a_call(fields, index=i).first(dispatch(), 10))[1] for i in range(4)]
        assert [(b["prompt"], b["n"], b["seed"]) for b in bodies] == [
            ("a", 1, 5),
            ("a", 1, 6),
            ("b", 1, 5),
            ("b", 1, 6),
        ]


class TestALaterAttempt:
    def test_a_later_attempt_continues_from_prompt_and_tokens(self) -> None:
        call = a_call({"prompt": "abc", "max_tokens": 10}, asks_ids=True)
        path, body = sent(
            call.resumed(dispatch(8, made=2), PROMPT, [ResponsePart([4]), ResponsePart([5])])
        )
        assert path == b"/v1/completions"
        assert (body["prompt"], body["max_tokens"], body["n"]) == ([1, 2, 3, 4, 5], 8, 1)
        assert (body["cache_salt"], body["return_token_ids"]) == ("v3", True)

    def test_a_chat_continues_as_a_completion(self) -> None:
        call = a_call({"messages": [{"role": "user"}]}, b"/v1/chat/completions", asks_ids=True)
        path, body = sent(call.resumed(dispatch(8), PROMPT, [ResponsePart([4])]))
        assert path == b"/v1/completions"
        assert "messages" not in body

    def test_knows_its_prompt_from_the_client_or_from_the_instance(self) -> None:
        told = [ResponsePart([4], prompt_ids=[7, 8])]
        assert a_call({"prompt": PROMPT}).prompt_ids(told) == PROMPT
        assert a_call({"prompt": "abc"}).prompt_ids(told) == [7, 8]
        assert a_call({"prompt": "abc"}).prompt_ids([ResponsePart([4])]) is None

    def test_an_unwritable_attempt_is_the_clients_fault(self) -> None:
        call = a_call(b'{"prompt": [1, 2.5]}')
        with pytest.raises(RequestRejected, match="cannot be passed on") as caught:
            call.prompt_ids([ResponsePart([4])])
        assert caught.value.status == 400
        assert json.loads(caught.value.body)["error"]["code"] == 400


@pytest.mark.parametrize(
    ("path", "engine_id"),
    [
        (b"/v1/completions?x=1", "cmpl-%s-0"),
        (b"/v1/chat/completions", "chatcmpl-%s"),
        (b"/inference/v1/generate", "generate-tokens-%s"),
    ],
)
@pytest.mark.parametrize(("mine", "name"), [(b"", "run-1"), (b"mine", "mine-run-1")])
def test_no_two_calls_have_the_same_name(
    path: bytes, engine_id: str, mine: bytes, name: str
) -> None:
    """Else a client could have another's response aborted by choosing its name."""
    instance = Instance()
    fields = {"prompt": "a", "messages": [], "token_ids": PROMPT}
    call = a_call(fields, path, request_id=mine, header_lines=b"x-a: 1\r\n")
    call.pass_on(instance, "run-1", path, b"{}", Nobody())
    (asked,) = instance.pool.asked
    assert asked.target == path.decode()
    assert (asked.headers[b"x-a"], asked.headers[b"x-request-id"]) == (b"1", name.encode())
    assert instance.names == {"run-1": engine_id % name}


def test_the_added_field_says_which_version_and_instance_made_what() -> None:
    segments = (Segment(3, 2, "http://a"), Segment(4, 5, "http://b"))
    sample = DeliveredSample("r", "g", 0, 3, 7, segments, 0, "stop")
    told = [
        {"version": 3, "start": 0, "end": 2, "instance": "http://a"},
        {"version": 4, "start": 2, "end": 7, "instance": "http://b"},
    ]
    assert json.loads(added(sample)) == {"segments": told}
    whole = json.loads(with_added(b'{"id":"x", "nested":{"a":1}} \n', sample))
    assert whole == {"id": "x", "nested": {"a": 1}, "rollout_sched": {"segments": told}}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "BadRequestError"), (499, "BadRequestError"), (500, "InternalServerError")],
)
def test_an_error_is_as_openais_clients_expect_it(status: int, kind: str) -> None:
    error = {"message": 'it "broke"', "type": kind, "code": status}
    assert json.loads(error_body(status, 'it "broke"')) == {"error": error}


def test_versions_of_several_attempts_are_worded_as_the_server_would() -> None:
    segments = (Segment(3, 4, "a"), Segment(3, 2, "b"), Segment(5, 1, "b"))
    sample = DeliveredSample("d", "p", 0, 3, 7, segments, 2, "stop")
    assert weight_versions(sample) == [
        {"version": "3", "start": 0, "end": 6},
        {"version": "5", "start": 6, "end": 7},
    ]
    assert weight_versions(DeliveredSample("d", "p", 0, 3, 0, (), 0, "stop")) == []


VALUES = {
    "order_id": "run-1",
    "engine_id": "cmpl-run-1-0",
    "path": "/v1/completions",
    "header_lines": b"",
    "body": b"{}",
    "receiver": Nobody(),
}


def real() -> HttpInstance:
    return HttpInstance("http://127.0.0.1:1", api_key="k")


async def test_the_client_has_all_of_it() -> None:
    client: Upstream = real()
    assert client.name == "http://127.0.0.1:1"
    assert client.request_headers == [(b"authorization", b"Bearer k")]
    assert client.labelled is False
    assert callable(client.pool.send)


@pytest.mark.parametrize("make", [real, Instance])
async def test_a_call_is_passed_on_as_the_port_says_and_can_be_held_back_and_stopped(
    make: Any,
) -> None:
    assert list(inspect.signature(Upstream.pass_on).parameters) == ["self", *VALUES]
    call: UpstreamCall = make().pass_on(**VALUES)
    call.pause()
    call.resume()
    call.cancel()
