"""The request of the hot path's server is what the data plane asks for, and so is the tests'."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane.client_request import HttpRequest
from rollout_sched.integrations.http.request import ReceivedRequest
from tests.integrations.gateway.scripted import Call

CALLS = {"answer": ["status", "headers", "body"], "begin": ["status", "headers"]}
CALLS |= {"write": ["data"], "end": []}


@pytest.mark.parametrize("name", CALLS)
def test_the_port(name: str) -> None:
    assert list(inspect.signature(getattr(HttpRequest, name)).parameters) == ["self", *CALLS[name]]


@pytest.mark.parametrize("kind", [ReceivedRequest, Call])
def test_whoever_hands_one_over_has_all_of_it(kind: type[Any]) -> None:
    assert [name for name in CALLS if not callable(getattr(kind, name))] == []
    told = {*HttpRequest.__annotations__, "method", "target", "headers", "fields", "body"}
    made = Call("/x", b"") if kind is Call else None
    missing = [name for name in sorted(told) if not hasattr(made or kind, name)]
    assert missing == []
