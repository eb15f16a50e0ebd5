"""Ids that vLLM makes of ours."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.vllm.protocol.endpoints import engine_id, names_another


@pytest.mark.parametrize(
    ("endpoint", "known_as"),
    [("completions", "cmpl-r1-0"), ("chat", "chatcmpl-r1"), ("generate", "generate-tokens-r1")],
)
def test_the_engine_knows_a_request_by_its_endpoint_and_id(endpoint, known_as):
    assert engine_id(endpoint, "r1") == known_as


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_an_id_that_the_engine_makes_names_its_order(endpoint):
    told = engine_id(endpoint, "mine-ab12cd34-17")
    assert not names_another(told, "ab12cd34-17")
    assert names_another(told, "ab12cd34-1")
    assert names_another(told, "ab12cd34-18")


@pytest.mark.parametrize(
    ("said", "another"),
    [
        ("cmpl-ab12cd34-17", False),
        ("cmpl-ab12cd34-17-0", False),
        ("cmpl-ab12cd34-18", True),
        ("cmpl-ab12cd34-170", True),
        ("cmpl-ab12cd34-1", True),
        ("generate-tokens-mine-ab12cd34-17", False),
        ("generate-tokens-mine-ab12cd34-3", True),
        ("cmpl-cmpl-ab12cd34-3-ab12cd34-17", False),  # named after an earlier answer of ours
        ("cmpl-0123456789abcdef", False),
        ("cmpl-ffffffff-18", False),
        ("", False),
    ],
)
def test_an_id_names_our_order_or_another(said, another):
    assert names_another(said, "ab12cd34-17") is another
