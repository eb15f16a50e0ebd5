"""What chats and completions have in common."""

from __future__ import annotations

import pytest

from rollout_sched.simulators.fake_instance import openai_answers as openai
from rollout_sched.simulators.fake_instance.requests import ChoiceChunk, ParsedRequest

CHUNK = ChoiceChunk(1, [5, 6], None, "length", None, first=True)


def asked(*, ids: bool = False, ids_for_words: bool = False) -> ParsedRequest:
    return ParsedRequest("cmpl-x", "m", [[1]], 2, [], False, False, ids, False, ids_for_words)


def test_an_answer_bears_the_id_of_its_request() -> None:
    answer = openai.answer(asked(), "text_completion", [], {"total_tokens": 3})
    assert (answer["id"], answer["model"], answer["object"]) == ("cmpl-x", "m", "text_completion")
    assert answer["usage"] == {"total_tokens": 3}


@pytest.mark.parametrize("ids", [False, True])
def test_a_choice_has_its_ids_if_they_were_asked_for(ids: bool) -> None:
    choice = openai.choice(asked(ids=ids), CHUNK, None)
    assert (choice["index"], choice["finish_reason"]) == (1, "length")
    assert choice.get("token_ids") == ([5, 6] if ids else None)


def test_log_probs_name_words_or_ids() -> None:
    assert openai.name(asked(), 5, "w5 ") == "w5 "
    assert openai.name(asked(ids_for_words=True), 5, "w5 ") == "token_id:5"
