"""Fields of requests, by endpoint."""

from __future__ import annotations

from rollout_sched.integrations.vllm.protocol.endpoints import (
    CHAT_ONLY,
    ENDPOINTS,
    INPUT,
    NEUTRAL_SAMPLING,
    UNKNOWN_TO_COMPLETIONS,
)


def test_every_endpoint_has_a_prompt():
    assert set(INPUT) == set(ENDPOINTS.values())
    assert len(set(INPUT.values())) == len(INPUT)


def test_the_prompt_of_a_chat_is_nothing_to_a_completion():
    assert INPUT["chat"] in CHAT_ONLY
    assert INPUT["completions"] not in CHAT_ONLY


def test_what_we_say_to_completions_is_known_there():
    assert not UNKNOWN_TO_COMPLETIONS & NEUTRAL_SAMPLING.keys()
