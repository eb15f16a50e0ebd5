"""What is sent to the two generating endpoints, and what is made of their answers."""

from __future__ import annotations

import json

import pytest

from rollout_sched.integrations.vllm.dialects import (
    NEUTRAL_SAMPLING,
    AnswerAssembler,
    Chunk,
    Completions,
    Generate,
)
from rollout_sched.integrations.vllm.protocol.answers import VersionSpan
from rollout_sched.live.ports import AnswerUntrue, InstanceError, RequestRejected
from tests.integrations.vllm.scripted import an_order, completed, generated

#: Each event says how many tokens were made by then.
COUNTED = {"include_usage": True, "continuous_usage_stats": True}


def sent(dialect, order):
    return json.loads(dialect.body(order, "tiny"))


def encoded(answer):
    return json.dumps(answer).encode()


def test_generate_sends_tokens_limits_and_salt():
    assert sent(Generate(), an_order(sampling={"top_p": 0.5})) == {
        "model": "tiny",
        "request_id": "a",
        "token_ids": [5, 6, 7],
        "cache_salt": "3",
        "stream": False,
        "sampling_params": {"top_p": 0.5, "max_tokens": 4, "detokenize": False},
    }


def test_generate_streams_with_an_interval():
    body = sent(Generate(), an_order(stream_every=16))
    assert body["stream"] is True
    assert body["sampling_params"]["stream_interval"] == 16
    assert body["stream_options"] == COUNTED


def test_stop_strings_need_the_text():
    body = sent(Generate(), an_order(sampling={"stop": ["END"]}))
    assert "detokenize" not in body["sampling_params"]


def test_completions_sends_the_same_with_nothing_left_to_the_models_defaults():
    sampling = {"top_p": 0.5, "logprobs": 0, "detokenize": False}
    assert sent(Completions(), an_order(sampling=sampling, stream_every=8)) == {
        **NEUTRAL_SAMPLING,
        "top_p": 0.5,
        "logprobs": 0,
        "max_tokens": 4,
        "model": "tiny",
        "request_id": "a",
        "prompt": [5, 6, 7],
        "return_token_ids": True,
        "cache_salt": "3",
        "stream": True,
        "stream_interval": 8,
        "stream_options": COUNTED,
    }


def test_completions_refuses_what_it_would_ignore():
    order = an_order(sampling={"skip_reading_prefix_cache": True})
    with pytest.raises(RequestRejected, match=r"skip_reading_prefix_cache.*--enable-scale-out"):
        Completions().body(order, "tiny")


@pytest.mark.parametrize("dialect", [Generate(), Completions()])
def test_an_order_is_for_one_response(dialect):
    with pytest.raises(RequestRejected, match="one response"):
        dialect.body(an_order(sampling={"n": 2}), "tiny")


def test_no_salt_is_no_field():
    order = an_order()
    order = type(order)(order.id, order.token_ids, 4, "", {})
    assert "cache_salt" not in sent(Generate(), order)
    assert "cache_salt" not in sent(Completions(), order)


def test_the_ids_that_abort_needs():
    assert Generate().engine_id("x") == "generate-tokens-x"
    assert Completions().engine_id("x") == "cmpl-x-0"


def test_generate_is_read():
    chunk = Generate().read(encoded(generated([10, 11], "stop", [("4", 0, 2)])))
    assert (chunk.token_ids, chunk.logprobs, chunk.finish) == ([10, 11], [-0.5, -1.5], "stop")
    assert [(s.version, s.start, s.end) for s in chunk.versions] == [("4", 0, 2)]


def test_completions_is_read():
    chunk = Completions().read(encoded(completed([10, 11], "stop")))
    assert (chunk.token_ids, chunk.logprobs, chunk.finish) == ([10, 11], [-0.5, -1.5], "stop")
    assert chunk.versions is None


@pytest.mark.parametrize(("dialect", "key"), [(Generate(), "request_id"), (Completions(), "id")])
def test_answers_are_read(dialect, key):
    end = {"index": 0, "token_ids": [1], "finish_reason": "stop"}
    for choices in ([end], []):
        assert dialect.read(encoded({key: "of-run-1", "choices": choices})).id == "of-run-1"
        assert dialect.read(encoded({"choices": choices})).id == ""


@pytest.mark.parametrize("dialect", [Generate(), Completions()])
def test_the_usage_chunk_is_an_empty_piece(dialect):
    chunk = dialect.read(b'{"choices": [], "usage": {"prompt_tokens": 3}}')
    assert (chunk.token_ids, chunk.finish) == ([], None)


def test_logprobs_of_vllm_before_0_32_name_no_tokens():
    choice = {"token_ids": [5], "logprobs": {"content": [{"token": "x", "logprob": -1}]}}
    assert Generate().read(encoded({"choices": [choice]})).logprobs == [-1.0]


@pytest.mark.parametrize("dialect", [Generate(), Completions()])
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>502 Bad Gateway</html>",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"error": {"message": "EngineCore encountered an issue"}}',
        b'{"choices": [{"token_ids": [1, "2"]}]}',
        b'{"choices": [{"token_ids": [1, -2]}]}',
        b'{"choices": [{"token_ids": [4294967296]}]}',
        b'{"choices": [{"token_ids": [true]}]}',
        b'{"choices": [{"token_ids": [1], "finish_reason": 7}]}',
        b'{"choices": [{"token_ids": [1], "logprobs": [-0.5]}]}',
        b'{"choices": [{"token_ids": [1]}, {"token_ids": [2]}]}',
    ],
)
def test_garbage_is_the_instances_fault(dialect, answer):
    with pytest.raises(InstanceError):
        dialect.read(answer)


def test_logprobs_of_other_tokens_are_refused():
    answer = generated([10, 11])
    answer["choices"][0]["token_ids"] = [10, 12]
    with pytest.raises(InstanceError, match="other token ids"):
        Generate().read(encoded(answer))


def test_completions_without_token_ids_says_which_vllm_has_them():
    with pytest.raises(InstanceError, match=r"0\.10\.2"):
        Completions().read(b'{"choices": [{"text": "hello", "finish_reason": "stop"}]}')


@pytest.mark.parametrize("dialect", [Generate(), Completions()])
@pytest.mark.parametrize("value", [object(), {(1,): 2}, "\udcff"])
def test_sampling_that_is_no_json_is_the_requests_fault(dialect, value):
    with pytest.raises(RequestRejected, match="cannot be written as JSON"):
        dialect.body(an_order(sampling={"top_p": value}), "tiny")


@pytest.mark.parametrize("dialect", [Generate(), Completions()])
def test_the_reported_number_of_tokens_is_read(dialect):
    choice = {"token_ids": [1], "finish_reason": None}
    told = [{"choices": [choice], "usage": usage} for usage in ({"completion_tokens": 7}, None)]
    told.append({"choices": [], "usage": {"completion_tokens": 8}})
    assert [dialect.read(encoded(answer)).made for answer in told] == [7, None, 8]


def assembled(chunks):
    assembly = AnswerAssembler(an_order())
    for chunk in chunks:
        assembly.add(chunk)
    return assembly.output()


def test_pieces_are_joined_and_handed_on():
    got = []
    assembly = AnswerAssembler(
        an_order(tokens=3), lambda tokens, logprobs: got.append((tokens, logprobs))
    )
    assembly.add(Chunk([1], [-0.5]))
    assembly.add(Chunk([]))
    assembly.add(Chunk([2, 3], [-0.25, -1.0], "length", [VersionSpan("4", 0, 3)]))
    output = assembly.output()
    assert (output.token_ids, output.logprobs) == ([1, 2, 3], [-0.5, -0.25, -1.0])
    assert (output.finish, output.spans) == ("length", ((4, 3),))
    assert got == [([1], [-0.5])], "the last come with the end"


def test_logprobs_not_asked_for_are_left_out():
    assembly = AnswerAssembler(an_order(sampling={}))
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
def test_impossible_answers_are_the_instances_fault(chunks, says):
    with pytest.raises(InstanceError, match=says):
        assembled(chunks)


def test_a_cut_answer_has_what_came():
    assembly = AnswerAssembler(an_order())
    assembly.add(Chunk([1], [-1.0]))
    output = assembly.cut()
    assert (output.token_ids, output.logprobs, output.finish) == ([1], [-1.0], "abort")


def test_an_answer_ended_before_the_cut_is_complete():
    """An abort that came too late: nothing goes on from there."""
    assembly = AnswerAssembler(an_order())
    assembly.add(Chunk([1], [-1.0], "stop"))
    assert assembly.cut().finish == "stop"


def test_the_usage_may_follow_the_end():
    assert assembled([Chunk([1], [-1.0], "stop"), Chunk([])]).finish == "stop"


def test_repeated_events_are_forwarded_once():
    """The end of a stream, which had told it, may never come."""
    got = []
    assembly = AnswerAssembler(an_order(), lambda tokens, logprobs: got.append(tokens))
    assembly.add(Chunk([1], [-1.0], made=1))
    with pytest.raises(AnswerUntrue):
        assembly.add(Chunk([1], [-1.0], made=1))
    assert got == [[1]]
