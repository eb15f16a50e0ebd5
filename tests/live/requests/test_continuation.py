"""What each field of a request means for a response that is cut and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.live.requests import continuation
from rollout_sched.live.requests.continuation import FIELDS, hindrance, resumed, seed_after

DOCS = Path(__file__).parents[3] / "docs" / "gateway.md"


@pytest.mark.parametrize(
    ("least", "made", "limit", "sent"),
    [(12, 0, 60, 12), (12, 6, 54, 6), (12, 20, 40, 0), (30, 0, 16, 16), (30, 16, 16, 14)],
)
def test_the_least_length_is_less_by_what_was_made_and_fits_its_attempt(
    least: int, made: int, limit: int, sent: int
) -> None:
    assert resumed({"min_tokens": least}, made, limit) == {"min_tokens": sent}


@given(st.integers(0, 5000), st.lists(st.integers(1, 900), min_size=1))
def test_parts_are_together_at_least_as_long_as_asked(least: int, limits: list[int]) -> None:
    """Each part ends as early as its `min_tokens` lets it."""
    made = 0
    for limit in limits:
        part = resumed({"min_tokens": least}, made, limit)["min_tokens"]
        assert part <= limit, "vLLM refuses more"
        if part < limit:  # it may end by itself
            assert made + part >= least
            return
        made += limit


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(1, 2**31), unique=True))
def test_no_two_attempts_have_the_same_seed(seed: int, made: list[int]) -> None:
    seeds = [seed_after(seed, tokens) for tokens in made]
    assert len(set(seeds)) == len(made)
    assert all(0 <= after < 2**63 for after in seeds)
    assert seed_after(seed, 0) == seed


def test_numbers_may_be_text() -> None:
    assert resumed({"min_tokens": "12"}, 5, 60) == {"min_tokens": 7}
    assert resumed({"seed": "7"}, 5, 60) == resumed({"seed": 7}, 5, 60)


def test_a_seed_of_none_stays_none() -> None:
    assert resumed({"seed": None}, 5, 9) == {"seed": None}
    assert resumed({"seed": -1}, 5, 9) == {"seed": -1}


def test_fields_about_the_prompt_go_with_the_first_attempt_only() -> None:
    fields = {"prompt_logprobs": 1, "temperature": 0.5}
    assert resumed(fields, 0, 9) == fields
    assert resumed(fields, 1, 9) == {"temperature": 0.5}


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_a_value_that_asks_for_nothing_hinders_nothing(value: object) -> None:
    for field, rule in FIELDS.items():
        if rule == "whole":
            assert hindrance({field: value}, searched=False) == ""
    assert (
        hindrance({"response_format": {"type": "text"}, "output_mode": "tokens"}, searched=False)
        == ""
    )
    assert hindrance({"output_mode": "derender"}, searched=False) == "output_mode"
    assert hindrance({"stop": "tokens"}, searched=False) == "stop"


def test_a_field_without_a_rule_hinders() -> None:
    assert (
        hindrance({"temperature": 1.0, "of_a_later_vllm": 1}, searched=False) == "of_a_later_vllm"
    )


def test_the_documented_table_is_this_one() -> None:
    assert continuation.table() in DOCS.read_text(), continuation.table()
