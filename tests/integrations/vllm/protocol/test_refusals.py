"""Whose fault a status is, for the trainer's orders and for clients' calls alike."""

from __future__ import annotations

import json

import pytest

from rollout_sched.integrations.vllm.protocol.answers import failure
from rollout_sched.integrations.vllm.protocol.refusals import (
    AnswerRefused,
    refusal,
    refusal_of_request,
)
from rollout_sched.live.ports import EnginePaused, RequestRejected, RequestTooLong

NO_MODEL = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError"}}'


@pytest.mark.parametrize("status", [400, 406, 411, 412, 413, 414, 415, 416, 417, 422, 428, 431])
@pytest.mark.parametrize("serves", [None, ("x",)])
def test_a_request_is_at_fault_for_its_body_and_its_headers(status, serves):
    error = refusal_of_request(status, b"too long", "/x", serves=serves)
    assert isinstance(error, RequestRejected)
    assert (error.status, error.body, str(error)) == (
        status,
        b"too long",
        f"/x answered {status}: too long",
    )


def test_a_request_too_long_for_its_instance_may_fit_another():
    body = b"This model's maximum context length is 100 tokens. However, your prompt contains 101"
    assert isinstance(refusal_of_request(400, body), RequestTooLong)
    assert not isinstance(refusal_of_request(422, body), RequestTooLong)


@pytest.mark.parametrize("status", [401, 403, 404, 405, 407, 408, 409, 421, 425, 426, 429, 499])
@pytest.mark.parametrize("serves", [None, ("x",)])
def test_routing_and_key_errors_are_not_the_requests_fault(status, serves):
    error = refusal_of_request(status, b"{}", serves=serves)
    assert isinstance(error, AnswerRefused)
    assert str(error).startswith(f"it answered {status}: {{}}")


@pytest.mark.parametrize("status", [199, 204, 301, 500, 502, 503])
def test_other_statuses_are_the_instances_fault(status):
    assert isinstance(refusal_of_request(status, b"", serves=("x",)), AnswerRefused)


def test_a_paused_engine_is_nobodys_fault() -> None:
    """vLLM 0.33 after /pause?mode=abort or wait."""
    message = "Generation is paused. Please retry after it resumes."
    body = json.dumps({"error": {"message": message, "code": 503}}).encode()
    assert isinstance(refusal_of_request(503, body), EnginePaused)
    assert isinstance(failure(body), EnginePaused)
    assert isinstance(refusal_of_request(500, body), AnswerRefused)
    assert not isinstance(failure(body.replace(b"Gen", b"gen")), EnginePaused)


def test_an_unknown_model_is_the_fault_of_its_caller():
    assert isinstance(refusal_of_request(404, NO_MODEL, serves=("y", "")), RequestRejected)
    assert isinstance(refusal_of_request(404, NO_MODEL), AnswerRefused)
    assert isinstance(refusal_of_request(404, b"Not Found", serves=("y",)), AnswerRefused)


def test_a_model_that_the_instance_had_when_it_joined_is_the_instances_fault():
    error = refusal_of_request(404, NO_MODEL, serves=("y", "x"))
    assert isinstance(error, AnswerRefused)
    assert "it no longer serves x" in str(error)


@pytest.mark.parametrize(
    "name", ["z` does not exist. The model `x", "The model `x` does not exist.", "`x`", "X"]
)
def test_no_name_that_a_client_makes_up_accuses_the_instance(name):
    body = NO_MODEL.replace(b"`x`", f"`{name}`".encode())
    assert isinstance(refusal_of_request(404, body, serves=("x",)), RequestRejected)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "API key"),
        (403, "--enable-scale-out"),
        (404, "VLLM_SERVER_DEV_MODE"),
        (405, "not a vLLM"),
    ],
)
def test_a_refusal_says_what_to_do_and_can_do_so_without_a_quotation(status, remedy):
    error = refusal(status, b"a secret\r\nof theirs", "/pause")
    assert str(error).startswith(f"/pause answered {status}: a secret  of theirs; ")
    assert remedy in str(error)
    assert remedy in error.unquoted
    assert "secret" not in error.unquoted


def test_a_long_answer_is_cut():
    assert len(str(refusal(500, b"x" * 10_000))) < 300
