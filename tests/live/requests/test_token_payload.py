"""Payloads: each attempt is asked for prompt and transcript, and its answer checked."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Spans
from rollout_sched.live.ports import (
    AnswerUntrue,
    InstanceError,
    OnTokens,
    Order,
    Outcome,
    Output,
    PromptToken,
)
from rollout_sched.live.requests.token_payload import (
    DraftTest,
    JoinedPieces,
    Piece,
    TokenPayload,
    TokenTranscript,
    acceptance,
    untestable,
)
from tests.live.scripted import Scripted


def payload(**other: int) -> TokenPayload:
    return TokenPayload([1, 2], {"logprobs": 0}, **other)  # type: ignore[arg-type]


def test_without_log_probabilities() -> None:
    store = TokenPayload([1], {})
    store.transcript.keep(1, 1, Piece([5], None))
    assert store.logprobs is None


def test_an_order_is_prompt_and_pieces() -> None:
    async def scene() -> None:
        instance = Scripted()
        store = payload()
        store.transcript.keep(1, 1, Piece([5], [-1.0]))
        dispatch = Dispatch("r", 2, "i0", 3, 9, 4, 1, 3)
        attempt = asyncio.create_task(store.attempt(instance, dispatch, "o"))
        order = await instance.order()
        assert (order.token_ids, order.salt, order.max_new_tokens) == ([1, 2, 5], "v4", 9)
        await instance.answer(0, [6])
        outcome = await attempt
        assert (outcome.tokens, outcome.finish) == (1, "stop")

    asyncio.run(scene())


def test_a_stream_that_breaks_off_leaves_what_it_brought() -> None:
    async def scene() -> None:
        instance = Scripted()
        store = payload(stream_every=2)
        dispatch = Dispatch("r", 3, "i0", 2, 9, 0)
        attempt = asyncio.create_task(store.attempt(instance, dispatch, "o"))
        await instance.stream(0, [5, 6])
        await instance.stream(0, [7])
        assert store.transcript.streamed(3) == 3
        assert store.transcript.streamed(99) == 0
        await instance.fail(0, InstanceError("reset"))
        with pytest.raises(InstanceError):
            await attempt
        store.transcript.keep(3, 3, store.transcript.partial(3, 3))
        assert store.response_ids == [5, 6, 7]
        assert store.logprobs == [-0.5] * 3

    asyncio.run(scene())


@pytest.mark.parametrize("logprobs", [None, [], [-1.0, -1.0]])
def test_missing_log_probabilities_are_the_instances_fault(logprobs: list[float] | None) -> None:
    async def scene() -> None:
        instance = Scripted()
        attempt = asyncio.create_task(
            payload().attempt(instance, Dispatch("r", 1, "i0", 2, 9, 0), "o")
        )
        order = await instance.order()
        instance._answers[order.id].set_result(Output([5], logprobs, "stop"))
        with pytest.raises(InstanceError, match="log-probabilities"):
            await attempt

    asyncio.run(scene())


class TestDrafts:
    """[1, 2] is the prompt; 5 6 7 were made under version 3, and are verified under 4."""

    DISPATCH = Dispatch("r", 2, "i0", 5, 9, 4, 3, 5, draft=((3, 3),))

    def payload(self, sampling: dict[str, Any] | None = None) -> TokenPayload:
        store = TokenPayload([1, 2], sampling or {}, test=DraftTest(0.0))
        store.transcript.keep(1, 3, Piece([5, 6, 7], [-1.0, -1.0, -1.0]))
        return store

    def run(
        self,
        store: TokenPayload,
        thought: Sequence[PromptToken] | None,
        *,
        stops: bool = False,
        spans: Spans = (),
    ) -> tuple[list[Order], list[int], Outcome]:
        """The orders, what was said to have passed, and what came of it; it goes on with 8."""
        orders: list[Order] = []
        told: list[int] = []

        class Instance(Scripted):
            async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
                orders.append(order)
                if len(orders) == 1:
                    prompt = None if thought is None else list(thought)
                    return Output([99], [-1.0], "length", spans, prompt)
                return Output([8], [-0.5], "stop", ((4, 1),))

        async def passed(tokens: int) -> Dispatch | None:
            told.append(tokens)
            store.transcript.cut(3 - tokens)
            rest = msgspec.structs.replace(self.DISPATCH, max_new_tokens=12 - tokens, draft=())
            return None if stops else rest

        outcome = asyncio.run(store.attempt_verified(Instance(), self.DISPATCH, "o", passed))
        return orders, told, outcome

    def test_one_order_hears_what_is_thought_of_it_and_one_goes_on(self) -> None:
        store = self.payload()
        likely = [PromptToken(-7.0, 9), *[PromptToken(-0.25, 1)] * 3]
        (first, second), told, outcome = self.run(store, likely)
        assert (first.token_ids, first.max_new_tokens, first.salt) == ([1, 2, 5, 6, 7], 1, "v4")
        assert first.sampling == {"logprobs": 0, "prompt_logprobs": 0}
        assert (second.token_ids, second.max_new_tokens) == ([1, 2, 5, 6, 7], 9)
        assert second.sampling == {"logprobs": 0}
        assert told == [3]
        assert (outcome.tokens, outcome.finish, outcome.piece.token_ids) == (1, "stop", [8])
        assert store.logprobs == [-0.25] * 3
        assert store.transcript.joined.drawn_logprobs == [-1.0] * 3

    def test_it_goes_on_where_it_was_cut(self) -> None:
        store = self.payload()
        thought = [PromptToken(-7.0, 9), PromptToken(-0.25, 1), PromptToken(-9999.0, 80)]
        (_, second), told, _ = self.run(store, [*thought, PromptToken(-0.25, 1)])
        assert told == [1]
        assert (second.token_ids, second.max_new_tokens) == ([1, 2, 5], 11)
        assert store.logprobs == [-0.25]

    def test_greedy_is_held_to_what_is_likeliest(self) -> None:
        thought = [PromptToken(-7.0, 9), *[PromptToken(-9.0, 1)] * 2, PromptToken(-0.1, 2)]
        _, told, _ = self.run(self.payload({"temperature": 0}), thought)
        assert told == [2]

    def test_one_that_is_to_stop_makes_nothing(self) -> None:
        orders, _, outcome = self.run(self.payload(), [PromptToken(-0.5, 1)] * 4, stops=True)
        assert len(orders) == 1
        assert (outcome.tokens, outcome.finish) == (0, "abort")

    @pytest.mark.parametrize(
        ("thought", "text"),
        [
            (None, "5 tokens came with 0"),
            ([PromptToken(-0.5, 1)] * 3, "came with 3"),
            ([PromptToken(-0.5, 1)] * 5, "came with 5"),
            ([PromptToken(-0.5, 1)] * 3 + [PromptToken(2.5, 1)], "--logprobs-mode"),
            ([PromptToken(-0.5, 1)] * 3 + [PromptToken(math.nan, 1)], "--logprobs-mode"),
            ([PromptToken(-0.5, 1)] * 3 + [PromptToken(-math.inf, 1)], "--logprobs-mode"),
        ],
    )
    def test_what_cannot_be_is_the_instance_s_fault_and_nothing_is_lost(
        self, thought: list[PromptToken] | None, text: str
    ) -> None:
        store = self.payload()
        with pytest.raises(AnswerUntrue, match=text):
            self.run(store, thought)
        assert store.response_ids == [5, 6, 7]
        assert store.logprobs == [-1.0] * 3

    def test_a_whole_response_of_which_all_has_passed_needs_no_second_order(self) -> None:
        store = self.payload()
        orders: list[Order] = []

        class Instance(Scripted):
            async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
                orders.append(order)
                return Output([99], [-1.0], "length", (), [PromptToken(-0.5, 1)] * 4)

        async def passed(tokens: int) -> Dispatch:
            assert tokens == 3
            return msgspec.structs.replace(self.DISPATCH, draft=(), ends=True)

        outcome = asyncio.run(store.attempt_verified(Instance(), self.DISPATCH, "o", passed))
        assert len(orders) == 1
        assert (outcome.tokens, outcome.finish) == (0, "stop")

    def test_older_weights_verify_nothing(self) -> None:
        with pytest.raises(AnswerUntrue, match="used an older one"):
            self.run(self.payload(), [PromptToken(-0.5, 1)] * 4, spans=((3, 1),))

    def test_what_a_tool_has_answered_is_kept_as_a_whole_or_not_at_all(self) -> None:
        store = self.payload()
        store.transcript.observe(1, [20])
        store.transcript.keep(2, 1, Piece([8], [-1.0]))
        good, bad = PromptToken(-0.5, 1), PromptToken(-9999.0, 9)
        assert store.kept(self.DISPATCH, [good, good, good, bad]) == 3
        assert store.kept(self.DISPATCH, [good, good, bad, good]) == 0
        assert store.kept(self.DISPATCH, [good, good]) == 2  # all that was to be verified


# -- Transcripts: the pieces joined are what the core counts --


def test_pieces_join_in_order() -> None:
    store = TokenTranscript()
    store.keep(1, 2, Piece([5, 6], [-1.0, -2.0]))
    store.keep(4, 1, Piece([7], [-3.0]))
    assert store.token_ids == [5, 6, 7]
    assert store.logprobs == [-1.0, -2.0, -3.0]
    assert store.attempts == 2


def test_no_more_is_kept_than_counts() -> None:
    store = TokenTranscript()
    store.keep(1, 1, Piece([5, 6], [-1.0, -2.0]))
    assert (store.token_ids, store.logprobs) == ([5], [-1.0])
    store.keep(2, 0, Piece([9], [-1.0]))
    assert store.attempts == 1


def test_dropping_one_or_all() -> None:
    store = TokenTranscript()
    store.keep(1, 1, Piece([5], [-1.0]))
    store.keep(2, 1, Piece([6], [-1.0]))
    store.drop(1)
    assert store.token_ids == [6]
    store.drop(0)
    assert store.token_ids == []


def test_of_a_stream_only_what_counts_is_kept() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5, 6], [-1.0, -2.0])
    collect([7], [-3.0])
    assert (store.streamed(3), store.attempts) == (3, 0)
    store.keep(3, 2, store.partial(3, 2))
    assert (store.token_ids, store.logprobs) == ([5, 6], [-1.0, -2.0])
    assert store.streamed(3) == 0


def test_what_a_stream_brings_after_it_was_kept_does_not_count() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5, 6], [-1.0, -2.0])
    store.keep(3, 2, store.partial(3, 2))
    collect([7], [-3.0])  # its client has yet to hear that it is over
    assert (store.token_ids, store.logprobs) == ([5, 6], [-1.0, -2.0])


def test_a_stream_that_brings_no_log_probabilities_once_has_none() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5], [-1.0])
    collect([6], None)
    assert store.partial(3, 2) == Piece([5, 6], None)


class TestDraftsTranscript:
    def store(self) -> TokenTranscript:
        """5 6 | observed 9 | 7, of two turns and three attempts."""
        store = TokenTranscript()
        store.keep(1, 1, Piece([5], [-1.0]))
        store.keep(2, 1, Piece([6], [-2.0]))
        store.observe(2, [9])
        store.keep(3, 2, Piece([7, 8], [-3.0, -4.0]))
        return store

    def test_what_was_verified_has_two_log_probabilities(self) -> None:
        store = self.store()
        store.verified([-1.5, -2.5, -3.5])
        assert store.logprobs == [-1.5, -2.5, 0.0, -3.5, -4.0]
        assert store.joined.drawn_logprobs == [-1.0, -2.0, 0.0, -3.0, -4.0]
        assert store.joined.settled == 2

    def test_a_cut_takes_the_last_tokens_and_what_is_known_of_them(self) -> None:
        store = self.store()
        store.verified([-1.5, -2.5, -3.5, -4.5])
        store.cut(1)
        assert (store.token_ids, store.logprobs) == ([5, 6, 9, 7], [-1.5, -2.5, 0.0, -3.5])
        store.keep(4, 1, Piece([3], [-9.0]))
        assert store.logprobs == [-1.5, -2.5, 0.0, -3.5, -9.0]

    def test_a_cut_may_take_a_turn_as_a_whole(self) -> None:
        store = self.store()
        store.cut(2)
        assert (store.token_ids, store.joined.mask) == ([5, 6, 9], [1, 1, 0])

    def test_nothing_is_left_of_what_a_tool_has_answered_in_part(self) -> None:
        store = self.store()
        store.verified([-1.5, -2.5, -3.5, -4.5])
        store.cut(3)
        assert (store.token_ids, store.logprobs, store.joined.settled) == ([], [], 0)

    def test_a_cut_goes_over_attempts_of_one_turn(self) -> None:
        store = TokenTranscript()
        for attempt in (1, 2, 3):
            store.keep(attempt, 2, Piece([attempt] * 2, [-1.0] * 2))
        store.cut(3)
        assert store.token_ids == [1, 1, 2]

    def test_starting_over_forgets_what_was_verified(self) -> None:
        store = self.store()
        store.verified([-1.5])
        store.drop(0)
        store.keep(7, 1, Piece([4], [-0.5]))
        assert store.logprobs == [-0.5]


# -- Pieces read as one response: what was generated, what tools returned and so settled --


def joined(*pieces: Piece) -> JoinedPieces:
    return JoinedPieces(dict(enumerate(pieces, 1)))


def test_nothing_was_made_yet() -> None:
    empty = joined()
    assert (empty.token_ids, empty.mask, empty.drawn_logprobs) == ([], [], [])
    assert (empty.turns, empty.turn_ids, empty.settled) == (0, [], 0)


def test_a_response_of_several_attempts_is_one_turn() -> None:
    response = joined(Piece([5, 6], [-1.0, -2.0]), Piece([7], [-3.0]))
    assert response.token_ids == response.turn_ids == [5, 6, 7]
    assert (response.mask, response.turns, response.settled) == ([1, 1, 1], 0, 0)
    assert response.drawn_logprobs == [-1.0, -2.0, -3.0]


def test_what_a_tool_returned_stands_between_turns_and_settles_what_came_before() -> None:
    response = joined(
        Piece([5], [-1.0]), Piece([6], [-2.0], observed=[9, 9]), Piece([7, 8], [-3.0, -4.0])
    )
    assert response.token_ids == [5, 6, 9, 9, 7, 8]
    assert response.mask == [1, 1, 0, 0, 1, 1]
    assert response.drawn_logprobs == [-1.0, -2.0, 0.0, 0.0, -3.0, -4.0]
    assert (response.turns, response.turn_ids, response.settled) == (1, [7, 8], 2)


def test_a_tool_may_return_nothing() -> None:
    response = joined(Piece([5], None, observed=[]))
    assert (response.turns, response.turn_ids, response.settled) == (1, [], 1)
    assert (response.token_ids, response.drawn_logprobs) == ([5], [])


# -- The test of drafts: its distribution counted out on models small enough, and what it refus --

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
