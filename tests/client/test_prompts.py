"""Prompts before they go anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_sched.client.rollout_scheduler import checked
from rollout_sched.core.errors import CallerError
from rollout_sched.live.trainer.samples import Prompt

PLAIN = Prompt("a", [1, 2], 2, 9, {"seed": 3}, history=[4, 5])


def one(**fields: Any) -> Prompt:
    given: dict[str, Any] = {"uid": "a", "prompt_ids": [1, 2], "samples": 2, "max_tokens": 9}
    (prompt,) = checked([Prompt(**(given | fields))])
    return prompt


def test_valid_prompt_is_unchanged() -> None:
    assert list(checked([PLAIN])) == [PLAIN]


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_arrays_and_their_numbers_become_pythons(kind: Any) -> None:
    prompt = one(
        prompt_ids=np.array([1, 2], kind),
        samples=kind(2),
        max_tokens=kind(9),
        sampling={"seed": kind(3)},
        history=np.array([4, 5], kind),
    )
    assert prompt == PLAIN
    numbers = [*prompt.prompt_ids, prompt.samples, prompt.max_tokens, prompt.sampling["seed"]]
    assert {type(number) for number in numbers} == {int}
    assert one(prompt_ids=[kind(1), kind(2)]).prompt_ids == [1, 2]


def test_extra_comes_back_as_it_went() -> None:
    mine = object()
    assert one(extra={"mine": mine}).extra["mine"] is mine


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"prompt_ids": "hello"},
            "prompt_ids are token ids, such as tokenizer.encode(text), not text",
        ),
        ({"prompt_ids": [1, 2.5]}, "at `$.prompt_ids[1]`"),
        ({"prompt_ids": np.array([1.0])}, "Expected `int`, got `float`"),
        ({"prompt_ids": [[1, 2]]}, "got `array` - at `$.prompt_ids[0]`"),
        ({"prompt_ids": []}, "length >= 1 - at `$.prompt_ids`"),
        ({"prompt_ids": [-1]}, ">= 0 - at `$.prompt_ids[0]`"),
        ({"prompt_ids": [object()]}, "got a object, expected a number"),
        ({"samples": 0}, "at `$.samples`"),
        ({"max_tokens": 4.5}, "Expected `int`, got `float` - at `$.max_tokens`"),
        ({"uid": "a\nb"}, "at `$.uid`"),
        ({"sampling": [("seed", 1)]}, "sampling must be a dict, not a list"),
        ({"each": 3}, "int"),
    ],
)
def test_invalid_field_is_named_with_its_index(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(CallerError) as caught:
        one(**fields)
    text = str(caught.value)
    assert text.startswith("group ")
    assert says in text


@pytest.mark.parametrize("given", [PLAIN, {"uid": "a"}, 3])
def test_other_types_are_refused_as_prompts(given: Any) -> None:
    with pytest.raises(CallerError, match="submit takes"):
        list(checked(given))
