"""Paths of vLLM's server."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.vllm.protocol import endpoints
from rollout_sched.integrations.vllm.protocol import endpoints as gauges
from rollout_sched.integrations.vllm.protocol.endpoints import (
    CHAT_ONLY,
    ENDPOINTS,
    INPUT,
    NEUTRAL_SAMPLING,
    UNKNOWN_TO_COMPLETIONS,
    engine_id,
    names,
)
from tests.integrations.vllm.scripted import METRICS


def test_every_generating_path_has_its_endpoint():
    assert {
        path.decode(): upstream_endpoint for path, upstream_endpoint in endpoints.ENDPOINTS.items()
    } == {
        "/v1/completions": "completions",
        "/v1/chat/completions": "chat",
        "/inference/v1/generate": "generate",
    }


@pytest.mark.parametrize(
    ("endpoint", "known_as"),
    [("completions", "cmpl-r1-0"), ("chat", "chatcmpl-r1"), ("generate", "generate-tokens-r1")],
)
def test_the_engine_knows_a_request_by_its_endpoint_and_id(endpoint, known_as):
    assert engine_id(endpoint, "r1") == known_as


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_an_id_that_the_engine_makes_names_its_order(endpoint):
    told = engine_id(endpoint, "mine-ab12cd34-17")
    assert names(told, "ab12cd34-17") is True
    assert names(told, "ab12cd34-1") is names(told, "ab12cd34-18") is False


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ("cmpl-ab12cd34-17", True),
        ("cmpl-ab12cd34-17-0", True),
        ("cmpl-ab12cd34-18", False),
        ("cmpl-ab12cd34-170", False),
        ("cmpl-ab12cd34-1", False),
        ("generate-tokens-mine-ab12cd34-17", True),
        ("generate-tokens-mine-ab12cd34-3", False),
        ("cmpl-cmpl-ab12cd34-3-ab12cd34-17", True),  # named after an earlier answer of ours
        ("cmpl-0123456789abcdef", None),
        ("cmpl-ffffffff-18", None),
        ("", None),
    ],
)
def test_an_id_names_our_order_or_another(said, ours):
    assert names(said, "ab12cd34-17") is ours


def test_a_server_of_vllms_was_seen_to_say_all_of_them():
    values = [value for name, value in vars(gauges).items() if name.isupper()]
    names = [value for value in values if str(value).startswith(("vllm:", "local_", "process_"))]
    assert len(names) == 13
    assert [name for name in names if name not in METRICS] == []


def test_every_endpoint_has_a_prompt():
    assert set(INPUT) == set(ENDPOINTS.values())
    assert len(set(INPUT.values())) == len(INPUT)


def test_the_prompt_of_a_chat_is_nothing_to_a_completion():
    assert INPUT["chat"] in CHAT_ONLY
    assert INPUT["completions"] not in CHAT_ONLY


def test_fields_for_completions_are_known_to_vllm():
    assert not UNKNOWN_TO_COMPLETIONS & NEUTRAL_SAMPLING.keys()
