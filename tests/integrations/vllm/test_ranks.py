"""Each server's ranks in a group that one call describes for all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.vllm.weights import VLLM, RankFields, deal

PRIME = RankFields("rank_offset", "inference_world_size")
WITHIN = RankFields("rank_offset", "world_size", within="init_info")


@given(st.integers(0, 4), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_every_rank_of_the_group_is_dealt_once(first: int, sizes: list[int]) -> None:
    world = first + sum(sizes)
    info = {"rank_offset": first, "world_size": world, "packed": True}
    dealt = deal(info, VLLM, sizes)
    ranks = [
        rank
        for own, size in zip(dealt, sizes, strict=True)
        for rank in range(own["rank_offset"], own["rank_offset"] + size)
    ]
    assert ranks == list(range(first, world))
    assert all(own["world_size"] == world and own["packed"] for own in dealt)


def test_a_size_that_is_not_said_is_filled_in() -> None:
    assert deal({"rank_offset": 1}, VLLM, [2, 1]) == [
        {"rank_offset": 1, "world_size": 4},
        {"rank_offset": 3, "world_size": 4},
    ]


def test_prime_s_trainer_is_not_counted() -> None:
    info = {"host": "h", "rank_offset": 0, "inference_world_size": 3}
    assert [own["rank_offset"] for own in deal(info, PRIME, [1, 2])] == [0, 1]


def test_fields_within_another() -> None:
    info = {"init_info": {"rank_offset": 1, "world_size": 3}, "other": 1}
    dealt = deal(info, WITHIN, [1, 1])
    assert [own["init_info"]["rank_offset"] for own in dealt] == [1, 2]
    assert all(own["other"] == 1 for own in dealt)


@pytest.mark.parametrize("info", [{}, {"path": "x"}, {"init_info": {}}, {"init_info": 7}])
@pytest.mark.parametrize("fields", [VLLM, WITHIN])
def test_what_names_no_rank_is_left_as_it_is(info: dict[str, Any], fields: RankFields) -> None:
    assert deal(info, fields, [1, 2]) == [info, info]


@pytest.mark.parametrize("world", [2, 4])
def test_a_group_of_another_size_would_hang(world: int) -> None:
    with pytest.raises(CallerError, match=r"it must be 3: call GET /get_world_size"):
        deal({"rank_offset": 1, "world_size": world}, VLLM, [1, 1])


@pytest.mark.parametrize("value", [-1, True, "1", 1.0, None, 2**40])
def test_a_rank_is_a_number(value: object) -> None:
    with pytest.raises(CallerError, match="rank_offset must be a number"):
        deal({"rank_offset": value, "world_size": 3}, VLLM, [1, 1])
