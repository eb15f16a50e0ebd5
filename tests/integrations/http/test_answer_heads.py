"""Heads of answers, in packets."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.heads import MAX_HEAD, MAX_INTERIM, AnswerHeads

EARLY = b"HTTP/1.1 103 Early Hints\r\na: b\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"


@pytest.mark.parametrize("packet", [1, 7, 1000])
def test_interim_answers_are_passed_over(packet):
    data = EARLY * 2 + HEAD + b"abc"
    heads = AnswerHeads()
    assert not heads.begun
    told = []
    for at in range(0, len(data), packet):
        told.append(heads.read(data[at : at + packet]))
        if told[-1]:
            break
        assert heads.begun
    assert (heads.status, heads.head.length(0)) == (200, 3)
    assert heads.rest == b"abc"[: len(heads.rest)]
    assert not heads.begun  # of the next answer


def test_each_answer_may_have_its_interim_ones():
    heads = AnswerHeads()
    for _ in range(3):
        assert heads.read(EARLY * MAX_INTERIM + HEAD)
    with pytest.raises(Malformed, match="interim"):
        heads.read(EARLY * (MAX_INTERIM + 1))


def test_a_head_that_is_too_long():
    line = b"HTTP/1.1 200 OK\r\na: "
    fits = line + b"x" * (MAX_HEAD - len(line) - 4) + b"\r\n\r\n"
    assert AnswerHeads().read(fits)
    with pytest.raises(Malformed, match="longer than"):
        AnswerHeads().read(fits[:-4] + b"x\r\n\r\n")
    with pytest.raises(Malformed, match="longer than"):
        AnswerHeads().read(fits[:-4] + b"xxxx")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 103 Early\r\ncontent-length: 1\r\n\r\n",
        b"HTTP/1.1 103 Early\r\nconnection: close\r\n\r\n",  # nothing may come behind it
    ],
)
def test_what_is_no_interim_answer(answer):
    with pytest.raises(Malformed):
        AnswerHeads().read(answer)
