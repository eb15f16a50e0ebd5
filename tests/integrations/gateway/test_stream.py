"""One attempt's stream: what of it the client hears, and what the scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane.stream import ClientStream, Stream
from rollout_sched.live.ports import (
    AnswerUntrue,
    InstanceError,
    Outcome,
    RequestRejected,
    WeightsUnknown,
)
from tests.integrations.gateway.scripted import chunk, compact
from tests.integrations.gateway.test_fanout import Reply

DONE = b"data: [DONE]\n\n"
USAGE = {"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


def event(fields: Any) -> bytes:
    return b"data: %b\n\n" % compact(fields)


class Watched:
    """A stream and what its client has heard."""

    def __init__(self, endpoint: Any = "completions", **terms: Any) -> None:
        self.reply = Reply()
        self.client = ClientStream(endpoint, self.reply)
        named = {"resumes": None, "segment": False, "labelled": False, **terms}
        self.stream = Stream(self.client, 1, "ab12-1", **named)

    def hears(self, *packets: bytes) -> bool:
        return [self.stream.receive(packet) for packet in packets][-1]

    @property
    def heard(self) -> list[Any]:
        events = b"".join(self.reply.said).split(b"\n\n")
        return [json.loads(told.removeprefix(b"data: ")) for told in events if told]

    @property
    def ids(self) -> list[int]:
        return [i for told in self.heard for c in told["choices"] for i in c.get("token_ids", [])]


STREAM = event(chunk([1])) + event(chunk([2, 3])) + event(chunk([4])) + event(chunk([5], "stop"))


@pytest.mark.parametrize("size", [1, 2, 17, 100, 10_000])
def test_everything_passes_but_the_end_however_it_is_cut(size: int) -> None:
    the = Watched()
    whole = STREAM + event(USAGE) + DONE
    done = the.hears(*(whole[at : at + size] for at in range(0, len(whole), size)))
    assert done
    assert the.ids == [1, 2, 3, 4]
    assert json.loads(the.stream.end.event)["choices"][0]["token_ids"] == [5]
    assert json.loads(the.stream.end.usage) == USAGE
    assert the.stream.outcome() == Outcome(5, "stop", (), None)
    assert the.stream.tokens.to_go_on_from() == [1, 2, 3, 4, 5]


def test_what_goes_on_as_vllm_writes_it_passes_as_it_came_and_uncounted() -> None:
    the = Watched()
    the.hears(event(chunk([1])))
    odd = event(chunk([2]))[:-4] + b' , "x":1}\n\n'
    the.hears(odd)
    assert the.reply.said[1] is odd
    assert (the.stream.tokens.count, len(the.stream.tokens.unread)) == (1, 1)


@pytest.mark.parametrize(("finish", "segment"), [("abort", False), ("length", True)])
def test_an_end_that_is_none_does_not_reach_the_client(finish: str, segment: bool) -> None:
    the = Watched(segment=segment)
    the.hears(event(chunk([1])), event(chunk([2], finish)), DONE)
    assert the.ids == [1, 2]
    assert [c["finish_reason"] for told in the.heard for c in told["choices"]] == [None, None]
    assert the.stream.end.event == b""
    assert the.stream.outcome() == Outcome(2, finish, (), None)  # type: ignore[arg-type]


def test_an_end_that_brings_nothing_is_not_even_an_event() -> None:
    the = Watched()
    the.hears(event(chunk([1])), event({**chunk([], "abort")}))
    assert len(the.heard) == 1


def test_a_length_that_the_client_asked_for_is_its_end() -> None:
    the = Watched(segment=False)
    the.hears(event(chunk([1], "length")))
    assert json.loads(the.stream.end.event)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("reason", ["repetition", "tool_calls"])
def test_every_other_reason_is_a_stop_that_the_client_hears_as_it_is(reason: str) -> None:
    the = Watched()
    the.hears(event(chunk([1], reason)))
    assert the.stream.outcome().finish == "stop"
    assert json.loads(the.stream.end.event)["choices"][0]["finish_reason"] == reason


def test_a_stream_that_only_says_done_has_stopped() -> None:
    the = Watched()
    assert the.hears(event(chunk([1])) + DONE)
    assert the.stream.outcome() == Outcome(1, "stop", (), None)
    assert the.stream.end.event == b""


def test_nothing_counts_after_done() -> None:
    the = Watched()
    the.hears(event(chunk([1], "stop")) + DONE + event(chunk([2])) + b"data: garbage\n\n")
    assert the.stream.outcome().tokens == 1


def test_it_has_not_ended_until_it_says_so() -> None:
    the = Watched()
    the.hears(event(chunk([1])))
    with pytest.raises(InstanceError, match="without a finish_reason"):
        the.stream.outcome()


@pytest.mark.parametrize(
    ("packet", "kind"),
    [
        (b"data: garbage\n\n", AnswerUntrue),
        (event({"error": {"message": "it died"}}), InstanceError),
        (event(chunk([2], "error")), InstanceError),
        (event({**chunk([2]), "id": "cmpl-ab12-2-0"}), InstanceError),
        (event({"choices": [{"token_ids": ["x"]}]}), AnswerUntrue),
    ],
)
def test_what_cannot_be_believed_is_not_passed_on(packet: bytes, kind: type[Exception]) -> None:
    the = Watched()
    the.hears(event(chunk([1])))
    with pytest.raises(InstanceError) as caught:
        the.hears(packet)
    assert type(caught.value) is kind
    assert the.ids == [1]


def test_more_after_the_end_cannot_be_made_good() -> None:
    the = Watched()
    the.hears(event(chunk([1], "stop")), event({"error": "late"}), b"data: garbage\n\n")
    with pytest.raises(RequestRejected, match="continued after its finish_reason"):
        the.hears(event(chunk([2])))


def versions(*labels: str) -> list[dict[str, Any]]:
    return [{"version": label, "start": n, "end": n + 1} for n, label in enumerate(labels)]


def test_the_end_says_which_weights_made_what() -> None:
    the = Watched(labelled=True)
    the.hears(event(chunk([1])), event(chunk([2], "stop", weight_versions=versions("3", "4"))))
    assert the.stream.outcome().spans == ((3, 1), (4, 1))


@pytest.mark.parametrize(
    ("labels", "because"), [(("3",), AnswerUntrue), (("default", "default"), WeightsUnknown)]
)
def test_versions_that_cannot_be_true_come_too_late(
    labels: tuple[str, ...], because: type[Exception]
) -> None:
    """The client has the tokens; the instance is looked at all the same."""
    the = Watched(labelled=True)
    with pytest.raises(RequestRejected, match="is not valid") as caught:
        the.hears(event(chunk([1])) + event(chunk([2], "stop", weight_versions=versions(*labels))))
    assert type(caught.value.because) is because


def test_a_later_attempt_speaks_as_the_first_did() -> None:
    the = Watched("chat", resumes=2)
    the.client.envelope = {"id": "chatcmpl-1", "object": "chat.completion.chunk"}
    end = chunk([4], "stop")
    the.hears(event({**chunk([3]), "prompt_token_ids": [1]}), event(end), event(USAGE), DONE)
    (told,) = the.heard
    assert (told["id"], told["object"]) == ("chatcmpl-1", "chat.completion.chunk")
    assert told["choices"][0]["delta"] == {"content": "w3 "}
    assert "prompt_token_ids" not in told
    assert json.loads(the.stream.end.usage)["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
    }


def test_a_later_attempt_is_read_to_the_last_event() -> None:
    """What passes unread would pass in another's name."""
    the = Watched(resumes=2)
    the.client.envelope = {"id": "first"}
    the.hears(event(chunk([3])), event(chunk([4])))
    assert [told["id"] for told in the.heard] == ["first", "first"]
    assert the.stream.tokens.unread == []


def test_an_event_that_cannot_be_translated_is_no_event() -> None:
    the = Watched(resumes=2)
    with pytest.raises(InstanceError, match="is not valid"):
        the.hears(b'data: {"choices":[{"token_ids":[1]}],"usage":{"prompt_tokens":null}}\n\n')
