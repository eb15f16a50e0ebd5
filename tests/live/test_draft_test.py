"""The test of drafts: its distribution counted out on models small enough, and what it refuses."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.live.ports import PromptToken
from rollout_sched.live.requests.token_payload import DraftTest, acceptance, untestable

#: A text is over with the word END, or when it is as long as it may be.
WORDS, LENGTH, END = 3, 4, 0
Probabilities = NDArray[np.float64]
Text = tuple[int, ...]


def is_over(text: Text) -> bool:
    return len(text) == LENGTH or END in text


BEGUN = [
    text
    for length in range(LENGTH)
    for text in itertools.product(range(WORDS), repeat=length)
    if not is_over(text)
]


class Model:
    """Any distribution of the next word after any text of a vocabulary of three."""

    def __init__(self, seed: int, towards: Model | None = None) -> None:
        dice = np.random.default_rng(seed)
        self.after: dict[Text, Probabilities] = {}
        for text in BEGUN:
            drawn = dice.dirichlet([0.7] * WORDS)
            other = drawn if towards is None else towards.after[text]
            self.after[text] = 0.4 * drawn + 0.6 * other

    def of(self, text: Text) -> float:
        """The probability of a text."""
        return math.prod(self.after[text[:i]][word] for i, word in enumerate(text))

    @property
    def texts(self) -> dict[Text, float]:
        words = range(WORDS)
        texts = [(*text, word) for text in BEGUN for word in words]
        return {text: self.of(text) for text in texts if is_over(text)}


def residual(old: Probabilities, new: Probabilities) -> Probabilities:
    rest = np.maximum(0.0, new - old)
    total: float = rest.sum()
    return rest / total if total > 1e-15 else new


def distance(p: Probabilities, q: Probabilities) -> float:
    """Total variation."""
    return float(np.abs(p - q).sum()) / 2


def verified(
    old: Model,
    new: Model,
    at_cut: Callable[[Probabilities, Probabilities], Probabilities],
    drafted: Callable[[Text], Text] = lambda text: text,
) -> dict[Text, float]:
    """The probability of every text that comes of what is `drafted` of the texts of `old`, verified
    by `new`: what is kept of it, a word by `at_cut`, and the rest by `new`."""
    found: dict[Text, float] = defaultdict(float)

    def go_on(text: Text, probability: float) -> None:
        if is_over(text):
            found[text] += probability
            return
        for word in range(WORDS):
            go_on((*text, word), probability * new.after[text][word])

    for whole, drawn in old.texts.items():
        draft, reached = drafted(whole), drawn
        for place, word in enumerate(draft):
            text = draft[:place]
            before, now = old.after[text], new.after[text]
            kept = acceptance(math.log(before[word]), math.log(now[word]))
            for other, probability in enumerate(at_cut(before, now)):
                go_on((*text, other), reached * (1 - kept) * probability)
            reached *= kept
        go_on(draft, reached)
    return found


def deviation(found: dict[Text, float], model: Model) -> float:
    return sum(abs(found[text] - model.of(text)) for text in model.texts) / 2


PAIRS = [(old := Model(seed), Model(seed + 100, old)) for seed in range(5)]


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_with_the_residual_at_the_cut_all_is_distributed_as_under_the_new_weights(
    old: Model, new: Model
) -> None:
    found = verified(old, new, residual)
    assert sum(found.values()) == pytest.approx(1)
    assert found == pytest.approx(new.texts, abs=1e-12)


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_without_it_one_place_is_off_by_what_is_said(old: Model, new: Model) -> None:
    found = verified(old, new, lambda before, now: now)
    assert sum(found.values()) == pytest.approx(1)
    bound = cut = 0.0
    for text in BEGUN:
        reached = math.prod(
            min(old.after[text[:i]][word], new.after[text[:i]][word]) for i, word in enumerate(text)
        )
        before, now = old.after[text], new.after[text]
        cut += reached * distance(before, now)
        bound += reached * distance(before, now) * distance(now, residual(before, now))
    assert 0 < deviation(found, new) <= bound + 1e-12
    assert bound < cut < 1
    assert bound < deviation(old.texts, new)  # better than to keep all of it


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_draft_that_was_cut_at_some_length_changes_nothing(old: Model, new: Model) -> None:
    """Interrupted after two words, whatever they are: tested as far as it goes."""
    found = verified(old, new, residual, drafted=lambda text: text[:2])
    assert found == pytest.approx(new.texts, abs=1e-12)


def test_an_end_that_is_always_drawn_anew_makes_longer_texts() -> None:
    """So the last token of a response that ended by itself is tested like the others."""
    (model, _), *_ = PAIRS
    same = verified(model, model, residual)
    assert same == pytest.approx(model.texts, abs=1e-12)
    longer = verified(model, model, residual, drafted=lambda text: text[:-1])
    assert mean_length(longer) > mean_length(same) + 0.1
    cut_at_the_limit = verified(model, model, residual, drafted=lambda text: text[: LENGTH - 1])
    assert cut_at_the_limit == pytest.approx(model.texts, abs=1e-12)


def mean_length(texts: dict[Text, float]) -> float:
    return sum(len(text) * probability for text, probability in texts.items())


def test_one_place_is_off_by_exactly_that() -> None:
    before, now = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.2, 0.3])
    kept = [acceptance(math.log(p), math.log(q)) for p, q in zip(before, now, strict=True)]
    cut = float(before @ (1 - np.array(kept)))
    made = before * kept + cut * now
    assert cut == pytest.approx(distance(before, now))
    assert distance(made, now) == pytest.approx(cut * distance(now, residual(before, now)))


@pytest.mark.parametrize("leniency", [0.0, 0.5, 2.0])
def test_a_kept_token_is_not_much_likelier_than_under_the_new_weights(leniency: float) -> None:
    for old, new in PAIRS:
        for text, before in old.after.items():
            for p, q in zip(before, new.after[text], strict=True):
                kept = acceptance(math.log(p), math.log(q), leniency)
                assert kept * p <= math.exp(leniency) * q + 1e-12
                assert kept >= acceptance(math.log(p), math.log(q))


def thought(*logprobs: float, rank: int = 1) -> list[PromptToken]:
    return [PromptToken(value, rank) for value in logprobs]


def dispatch(attempt: int = 1, request: str = "a/0") -> Dispatch:
    return Dispatch(request, attempt, "i0", 10, 10, 1)


def test_the_dice_keep_as_many_as_the_test_says() -> None:
    test, old, new = DraftTest(0.0), [-1.0, -1.0], thought(-1.5, -1.25)
    kept = Counter(test.passed(dispatch(number), old, new) for number in range(4000))
    first, second = math.exp(-0.5), math.exp(-0.25)
    assert kept[0] / 4000 == pytest.approx(1 - first, abs=0.03)
    assert kept[2] / 4000 == pytest.approx(first * second, abs=0.03)


def test_what_has_become_likelier_is_kept_and_what_cannot_be_is_not() -> None:
    test = DraftTest(0.0)
    assert test.passed(dispatch(), [-1.0, -2.0], thought(-0.5, -2.0)) == 2
    assert test.passed(dispatch(), [-1.0, -2.0], thought(-0.5, -9999.0)) == 1
    assert DraftTest(2.0).passed(dispatch(), [-1.0], thought(-3.0)) == 1
    assert test.passed(dispatch(), [], []) == 0


def test_each_attempt_has_dice_of_its_own_and_the_same_ones_again() -> None:
    old, new = [-1.0] * 50, thought(*[-1.1] * 50)
    one, other = DraftTest(0.0, 1), DraftTest(0.0, 2)
    drawn = [one.passed(dispatch(number), old, new) for number in range(20)]
    assert drawn == [one.passed(dispatch(number), old, new) for number in range(20)]
    assert drawn != [other.passed(dispatch(number), old, new) for number in range(20)]
    assert len(set(drawn)) > 1


def test_a_greedy_token_stays_as_long_as_it_is_the_likeliest() -> None:
    new = [*thought(-0.1, -0.2), *thought(-0.3, rank=2), *thought(-0.1)]
    assert DraftTest(5.0).passed(dispatch(), [-9.0] * 4, new, greedy=True) == 2


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 5, "seed": 3},
        {"temperature": 0, "top_p": 0.9},
        {"stop_token_ids": [7], "ignore_eos": True, "detokenize": False, "stop": []},
        {"repetition_penalty": 1.0, "bad_words": None, "min_tokens": 0},
    ],
)
def test_what_is_drawn_from_what_servers_tell_can_be_tested(sampling: dict[str, Any]) -> None:
    assert untestable(sampling) == ""


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 50},
        {"min_p": 0.05},
        {"min_tokens": 3},
        {"repetition_penalty": 1.1},
        {"temperature": 0, "presence_penalty": 0.5},
        {"logit_bias": {"7": 3.0}},
        {"bad_words": ["no"]},
        {"structured_outputs": {"json": {}}},
        {"stop": ["</answer>"]},
        {"prompt_logprobs": 1},
    ],
)
def test_what_is_drawn_from_something_else_is_named(sampling: dict[str, Any]) -> None:
    name = [key for key in sampling if key != "temperature"] or ["temperature"]
    assert name[0] in untestable(sampling)
