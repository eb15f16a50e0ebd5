"""Chunks of an answer: joined when they can be true, refused when they cannot."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.vllm.dialects import Assembly, Chunk
from rollout_sched.integrations.vllm.protocol.answers import VersionSpan
from rollout_sched.live.ports import AnswerUntrue, InstanceError, PromptToken
from tests.integrations.vllm.scripted import an_order


def assembled(chunks):
    assembly = Assembly(an_order())
    for chunk in chunks:
        assembly.add(chunk)
    return assembly.output()


def test_pieces_are_joined_and_handed_on():
    got = []
    assembly = Assembly(an_order(tokens=3), lambda tokens, logprobs: got.append((tokens, logprobs)))
    assembly.add(Chunk([1], [-0.5]))
    assembly.add(Chunk([]))
    assembly.add(Chunk([2, 3], [-0.25, -1.0], "length", [VersionSpan("4", 0, 3)]))
    output = assembly.output()
    assert (output.token_ids, output.logprobs) == ([1, 2, 3], [-0.5, -0.25, -1.0])
    assert (output.finish, output.spans) == ("length", ((4, 3),))
    assert got == [([1], [-0.5])], "the last come with the end"


def test_logprobs_not_asked_for_are_left_out():
    assembly = Assembly(an_order(sampling={}))
    assembly.add(Chunk([1], [-0.5], "stop"))
    assert assembly.output().logprobs is None


def test_an_abort_before_the_first_token_is_an_answer():
    output = assembled([Chunk([], None, "abort", [])])
    assert (output.token_ids, output.logprobs, output.finish, output.spans) == ([], [], "abort", ())


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ([Chunk([1, 2, 3, 4, 5], [-1.0] * 5)], "more tokens than the limit of 4"),
        ([Chunk([1, 2], [-1.0])], "1 log-probs with 2 tokens"),
        ([Chunk([1, 2], None, "stop")], "0 log-probs with 2 tokens"),
        ([Chunk([1], [-1.0], "error")], "finish_reason 'error'"),
        ([Chunk([1], [-1.0], "stop"), Chunk([2], [-1.0])], "after the end"),
        ([Chunk([1], [-1.0])], "broke off"),
        (
            [Chunk([1, 2], [-1.0] * 2, made=2), Chunk([1, 2], [-1.0] * 2, made=2)],
            "it reports 2 tokens made, but has sent 2 and these 2",
        ),
        ([Chunk([1], [-1.0], "stop"), Chunk([], made=2)], "reports 2 tokens made"),
        ([Chunk([1], [-1.0], "stop", [VersionSpan("1", 0, 2)])], "do not cover its 1 tokens"),
    ],
)
def test_what_cannot_be_true_is_the_instances_fault(chunks, says):
    with pytest.raises(InstanceError, match=says):
        assembled(chunks)


def test_the_answer_to_another_order_is_not_believed():
    """A server that sends an answer twice had its second copy taken for the next order's, which
    came by the same connection."""
    order = an_order("run-2", sampling={})
    for told in ("generate-tokens-run-1", "cmpl-run-20-0"):
        with pytest.raises(AnswerUntrue, match=f"answered run-2 with the answer to '{told}'"):
            Assembly(order).add(Chunk([1], [-0.5], "stop", id=told))
    for told in ("generate-tokens-run-2", "cmpl-run-2-0", "made-up", ""):
        assembly = Assembly(order)
        assembly.add(Chunk([1], [-0.5], "stop", id=told))
        assert assembly.output().token_ids == [1]


def test_a_cut_answer_has_what_came():
    assembly = Assembly(an_order())
    assembly.add(Chunk([1], [-1.0]))
    output = assembly.cut()
    assert (output.token_ids, output.logprobs, output.finish) == ([1], [-1.0], "abort")


def test_what_had_ended_when_it_was_cut_has_ended():
    """An abort that came too late: nothing goes on from there."""
    assembly = Assembly(an_order())
    assembly.add(Chunk([1], [-1.0], "stop"))
    assert assembly.cut().finish == "stop"


def test_the_usage_may_follow_the_end():
    assert assembled([Chunk([1], [-1.0], "stop"), Chunk([])]).finish == "stop"


def thought_of(told):
    """Of the context 5, 6, 7."""
    assembly = Assembly(an_order(sampling={"prompt_logprobs": 0}))
    assembly.add(Chunk([1], None, "length", prompt=told))
    return assembly.output().prompt


SIX, SEVEN = PromptToken(-0.5, 1), PromptToken(-9999.0, 40)


def test_what_is_thought_of_a_prompt_is_that_of_its_own_tokens():
    assert thought_of([{6: SIX, 3: SEVEN}, {7: SEVEN}]) == [SIX, SEVEN]
    assert thought_of(None) is None
    assert assembled([Chunk([1], [-1.0], "stop", prompt=[{6: SIX}, {7: SEVEN}])]).prompt is None


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ([{6: SIX}], "2 log-probs for a prompt of 3"),
        ([{6: SIX}, {7: SEVEN}, {8: SIX}], "4 log-probs for a prompt of 3"),
        ([{6: SIX}, {8: SIX}], "token 2 of its prompt"),
        ([{}, {7: SIX}], "token 1 of its prompt"),
    ],
)
def test_what_is_thought_of_another_prompt_is_not_believed(told, text):
    with pytest.raises(AnswerUntrue, match=text):
        thought_of(told)


def test_what_comes_twice_is_not_handed_on_twice():
    """The end of a stream, which had told it, may never come."""
    got = []
    assembly = Assembly(an_order(), lambda tokens, logprobs: got.append(tokens))
    assembly.add(Chunk([1], [-1.0], made=1))
    with pytest.raises(AnswerUntrue):
        assembly.add(Chunk([1], [-1.0], made=1))
    assert got == [[1]]
