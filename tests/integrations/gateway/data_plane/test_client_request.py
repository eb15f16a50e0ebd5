"""What is read of a client's request, and what of it goes on."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.gateway.data_plane import body as envelopes
from rollout_sched.integrations.gateway.data_plane.body import ClientBody
from rollout_sched.integrations.gateway.data_plane.client_request import (
    ClientRequest,
    check_head,
    read_client_request,
)
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from tests.integrations.gateway.scripted import Call, fields_of

TARGET = "/v1/completions?x=1"


def read(**headers: str) -> ClientRequest:
    call = Call(TARGET, {"prompt": "a", "group_id": "g", "session_id": "s"}, **headers)
    envelope = envelopes.read(call.body, "completions")
    return read_client_request(call, "completions", ClientBody(call.body, nested=False), envelope)


def test_headers_go_on_but_for_those_of_the_connection_and_ours() -> None:
    request = read(
        **{"x-mine": "1", "traceparent": "t", "host": "h", "connection": "close", "te": "trailers"},
        **{"authorization": "Bearer mine", "x-request-id": "r", "content-length": "2"},
        **{"accept-encoding": "br", "expect": "100-continue", "content-type": "application/json"},
    )
    assert fields_of(request.header_lines) == {
        b"x-mine": b"1",
        b"traceparent": b"t",
        b"content-type": b"application/json",
    }
    assert request.path == TARGET.encode()


def test_names_in_the_header_go_before_the_bodys() -> None:
    named = read(**{"x-group-id": "G", "x-session-id": "S"}).envelope
    assert (named.group, named.session) == ("G", "S")
    bare = read().envelope
    assert (bare.group, bare.session) == ("g", "s")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", b""),
        ("req-1.a:b_c", b"req-1.a:b_c"),
        ("a/b c\u00e9", b"a_b_c__"),
        ("x" * 200, b"x" * 64),
    ],
)
def test_a_clients_name_for_a_request_is_cut_to_what_can_be_kept(given: str, kept: bytes) -> None:
    assert read(**{"x-request-id": given}).request_id == kept


@pytest.mark.parametrize("header", ["x-group-id", "x-session-id", "x-request-id"])
@pytest.mark.parametrize("name", ["x" * 257, "a\x00b", "a\tb"])
def test_a_name_that_is_none_is_refused_by_its_header(header: str, name: str) -> None:
    with pytest.raises(BadRequest, match=f"(?i)`{header}`"):
        read(**{header: name})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-encoding": "identity"},
        {"content-type": "application/json"},
        {"content-type": 'application/json; Charset="UTF-8"'},
        {"content-type": "text/plain; charset=us-ascii"},
        {"content-type": "text/plain"},
    ],
)
def test_json_in_utf8_is_taken(headers: dict[str, str]) -> None:
    check_head(Call(TARGET, b"", **headers))


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"content-encoding": "gzip"}, "Content-Encoding 'gzip'"),
        ({"content-type": "application/json; charset=utf-16"}, "charset 'utf-16'"),
        ({"content-type": 'application/json;CHARSET="latin1"'}, "charset 'latin1'"),
    ],
)
def test_bodies_that_servers_read_differently_are_refused(
    headers: dict[str, str], says: str
) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        check_head(Call(TARGET, b"", **headers))
    assert caught.value.status == 415


def test_a_path_that_cannot_be_forwarded_is_refused() -> None:
    with pytest.raises(BadRequest, match="percent-encode"):
        check_head(Call("/v1/completions?\u00e9", b""))
