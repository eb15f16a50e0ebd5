"""Text that follows from its context."""

from __future__ import annotations

import pytest

from rollout_sched.simulators.fake_instance import tokens as text

PROMPT = [5, 17, 4]


def respond(context: list[int], count: int, draw: str = "", version: int = 0) -> list[int]:
    read = text.read(context)
    response = read.name or text.name(read, draw)
    return text.tokens(response, read.made_tokens, [(version, count)])


def test_a_response_goes_on_wherever_it_was_cut() -> None:
    whole = respond(PROMPT, 50, "id 1")
    assert len(set(whole)) > 40
    for cut in (1, 2, 17, 49):
        assert respond(PROMPT + whole[:cut], 50 - cut, "id 2") == whole[cut:]


def test_siblings_differ_unless_they_are_greedy() -> None:
    assert respond(PROMPT, 9, "id 1") != respond(PROMPT, 9, "id 2")
    assert respond(PROMPT, 9) == respond(PROMPT, 9)
    assert respond(PROMPT, 9) != respond([*PROMPT, 1], 9)


def test_another_version_makes_another_text_of_the_same_name() -> None:
    old, new = respond(PROMPT, 9), respond(PROMPT, 9, version=3)
    assert old[0] == new[0]
    assert not set(old[1:]) & set(new[1:])
    response = text.name(text.read(PROMPT))
    assert text.tokens(response, 0, [(0, 4), (3, 5)]) == old[:4] + new[4:]


def test_a_context_tells_what_it_is_made_of() -> None:
    first = respond(PROMPT, 6, "id 1")
    cut = text.read(PROMPT + first)
    assert (cut.prompt_tokens, cut.known_tokens, cut.made_tokens) == (3, 9, 6)
    assert cut.name == cut.stream == first[0]
    assert cut.prompt == text.read(PROMPT).prompt

    turn = text.read([*PROMPT, *first, 8, 8])
    assert (turn.prompt_tokens, turn.known_tokens, turn.made_tokens) == (3, 9, 0)
    assert (turn.name, turn.stream) == (0, first[0])

    second = respond([*PROMPT, *first, 8, 8], 4)
    resumed = text.read([*PROMPT, *first, 8, 8, *second])
    assert (resumed.name, resumed.stream, resumed.made_tokens) == (second[0], first[0], 4)
    assert resumed.known_tokens == 15


def test_logprobs_belong_to_places() -> None:
    values = text.logprobs(text.LARGEST.first_name + 1, 0, 100)
    assert text.logprobs(text.LARGEST.first_name + 1, 60, 40) == values[60:]
    assert all(-4 < value <= 0 for value in values)
    assert len(set(values)) > 90


def test_words_and_ids_go_both_ways() -> None:
    ids = [0, 623, text.LARGEST.first_name, text.LARGEST.size - 1]
    assert text.decode(ids) == f"w0 w623 w{text.LARGEST.first_name} w{text.LARGEST.size - 1} "
    assert text.encode(text.decode(ids)) == ids
    other = text.encode(f"What is w1? w{text.LARGEST.size}")
    assert len(other) == 4
    assert all(token < text.LARGEST.first_word for token in other)


@pytest.mark.parametrize("bad", [[], [-1], [text.LARGEST.size], ["a"], [[1]], [1 << 70]])
def test_an_invalid_context_is_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"token|vocabulary"):
        text.read(bad)


class TestVocabulary:
    @pytest.mark.parametrize("size", [64, 509, 32_000, 151_936])
    def test_all_ids_are_within_the_vocabulary(self, size: int) -> None:
        vocabulary = text.Vocabulary.of_size(size)
        prompt = text.encode("What is w1 and w999999999 ?", vocabulary)
        name = text.name(text.read(prompt, vocabulary), "x", vocabulary)
        response = text.tokens(name, 0, [(0, 300), (1, 300)], vocabulary)
        assert all(0 <= token < size for token in [*prompt, *response])
        assert len(set(response)) > 10

    @pytest.mark.parametrize("size", [64, 151_936])
    def test_a_response_goes_on_wherever_it_was_cut(self, size: int) -> None:
        vocabulary = text.Vocabulary.of_size(size)
        name = text.name(text.read(PROMPT, vocabulary), "", vocabulary)
        whole = text.tokens(name, 0, [(0, 30)], vocabulary)
        for cut in (1, 2, 29):
            read = text.read(PROMPT + whole[:cut], vocabulary)
            assert (read.name, read.made_tokens, read.prompt_tokens) == (name, cut, len(PROMPT))

    def test_an_id_beyond_it_is_none(self) -> None:
        with pytest.raises(ValueError, match="512 is out of vocabulary"):
            text.read([1, 512], text.Vocabulary.of_size(512))

    def test_too_few_ids_are_none(self) -> None:
        with pytest.raises(ValueError, match="at least 64 ids, not 63"):
            text.Vocabulary.of_size(63)
