"""Text that follows from its context."""

from __future__ import annotations

import pytest

from rollout_sched.simulators.fake_instance import synthetic_tokens as text

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
    values = text.logprobs(text.NAMES + 1, 0, 100)
    assert text.logprobs(text.NAMES + 1, 60, 40) == values[60:]
    assert all(-4 < value <= 0 for value in values)
    assert len(set(values)) > 90


def test_words_and_ids_go_both_ways() -> None:
    ids = [0, 623, text.NAMES, text.LIMIT - 1]
    assert text.decode(ids) == f"w0 w623 w{text.NAMES} w{text.LIMIT - 1} "
    assert text.encode(text.decode(ids)) == ids
    other = text.encode(f"What is w1? w{text.LIMIT}")
    assert len(other) == 4
    assert all(token < text.SYNTHETIC for token in other)


@pytest.mark.parametrize("bad", [[], [-1], [text.LIMIT], ["a"], [[1]], [1 << 70]])
def test_what_is_no_context_is_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"token|vocabulary"):
        text.read(bad)
