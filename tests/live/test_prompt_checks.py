"""What of a prompt could never be made."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.live.trainer.submissions import check_prompt


def check(
    *, max_model_len: int = 0, turns: bool = False, verified: bool = False, **fields: Any
) -> None:
    given: dict[str, Any] = {"uid": "a", "prompt_ids": [1] * 60, "samples": 2, "max_tokens": 50}
    check_prompt(
        Prompt(**(given | fields)), max_model_len=max_model_len, turns=turns, verified=verified
    )


@pytest.mark.parametrize("most", [0, 110])
def test_what_fits_or_cannot_be_told(most: int) -> None:
    check(max_model_len=most)


def test_what_does_not_fit_with_what_would() -> None:
    with pytest.raises(CallerError, match=r"'a': .*60 \+ 50 tokens.* is 100; max_tokens can be 40"):
        check(max_model_len=100)
    with pytest.raises(CallerError, match="leaves no room in max_model_len, 60; shorten it"):
        check(max_model_len=60)


def test_turns_end_where_there_is_no_more_room() -> None:
    check(max_model_len=61, turns=True)
    with pytest.raises(CallerError, match="leaves no room"):
        check(max_model_len=60, turns=True)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temprature": 1.0}, "has no parameter 'temprature'; did you mean \"temperature\"?"),
        ({"zzz": 1}, "has no parameter 'zzz'"),
        ({"n": 4}, "set Prompt.samples"),
        ({"max_tokens": 4}, "set Prompt.max_tokens"),
    ],
)
def test_sampling_that_nobody_would_heed(sampling: dict[str, Any], says: str) -> None:
    for where in ({"sampling": sampling}, {"each": [{}, sampling]}):
        with pytest.raises(CallerError) as caught:
            check(**where)
        assert says in str(caught.value)


def test_what_cannot_be_verified_is_refused_only_where_it_would_be() -> None:
    check(sampling={"top_p": 0.9})
    with pytest.raises(CallerError, match=r'top_p = 0.9 .*interruption.kv to "recompute"'):
        check(sampling={"top_p": 0.9}, verified=True)
