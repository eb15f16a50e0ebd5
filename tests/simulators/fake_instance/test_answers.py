"""Which line of text an attempt writes, and who may go on with it."""

from __future__ import annotations

import math

import pytest

from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance.answers import OpenAnswer, OpenAnswers, TokenStreams
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec, SimRequest
from rollout_sched.simulators.instance.sim_instance import SimInstance
from tests.simulators.instance.reference import ReferenceInstance


def begun(answers: OpenAnswers, name: str) -> tuple[int, OpenAnswer]:
    """All say the same to the same prompt."""
    order = Order(name, [1, 2], 9, "", {"temperature": 0.0})
    request, answer = answers.read(order, None)
    answers.open(request.attempt, answer)
    return request.attempt, answer


def test_a_line_has_one_writer_whoever_else_is_aborted_or_ends() -> None:
    answers = OpenAnswers(lambda order, response: 5, versioned_text=False)
    first, aborted = begun(answers, "a")
    answers.stop_writing(aborted)
    _, writer = begun(answers, "b")
    assert writer.stream == aborted.stream
    answers.stop_writing(aborted)  # once more, as it is cancelled
    _, another = begun(answers, "c")
    answers.close(first)
    _, last = begun(answers, "d")
    assert len({writer.stream, another.stream, last.stream}) == 3


def test_an_ended_request_leaves_its_line_to_others() -> None:
    answers = OpenAnswers(lambda order, response: 5, versioned_text=False)
    number, ended = begun(answers, "a")
    answers.close(number)
    _, other = begun(answers, "b")
    assert other.stream == ended.stream


Kind = type[SimInstance] | type[ReferenceInstance]

COST = CostModel(step_s=1.0, weights_s=0.0, token_s=0.01, sequence_s=0.05, context_s=0.001)


def play(every: int, lengths: list[int], kind: Kind = SimInstance, **settings: int) -> list[object]:
    """(time, attempt, tokens) of every chunk and (time, attempt) of every end."""
    spec = InstanceSpec(
        **{
            "cost": COST,
            "kv_blocks": 100,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            **settings,
        }  # type: ignore[arg-type]
    )
    one = kind(spec)
    streams = TokenStreams(one)
    seen: list[object] = []
    now = 0.0
    for number, length in enumerate(lengths):
        one.submit(SimRequest(number, 30, length, 1000, number, 0, number), now)

        def note(tokens: int, step: int, number: int = number) -> None:
            seen.append((now, number, tokens))

        streams.add(number, every, note)
    while (now := min(one.next_at(), streams.next_at())) < math.inf:
        for word in one.advance(now):
            streams.remove(word.attempt)
            seen.append((word.at, word.attempt))
        streams.advance(now)
    return seen


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 2}, {"kv_blocks": 24}, {"max_num_batched_tokens": 200}]
)
def test_every_chunk_comes_with_its_step(settings: dict[str, int]) -> None:
    lengths = [5, 40, 23, 8, 60, 31]
    seen = play(4, lengths, **settings)
    assert seen == sorted(seen, key=lambda what: what[0])  # type: ignore[index]
    for number, length in enumerate(lengths):
        chunks = [what[2] for what in seen if len(what) == 3 and what[1] == number]  # type: ignore
        assert chunks == list(range(1, length, 4))
    stepped = play(4, lengths, ReferenceInstance, **settings)
    key = lambda what: (what[1], len(what), *what[2:])  # noqa: E731
    for one, other in zip(sorted(seen, key=key), sorted(stepped, key=key), strict=True):
        assert one[1:] == other[1:]  # type: ignore[index]
        assert one[0] == pytest.approx(other[0], rel=1e-9)  # type: ignore[index]


def test_without_streams_nothing_is_due() -> None:
    one = SimInstance(InstanceSpec(cost=COST, kv_blocks=100))
    streams = TokenStreams(one)
    one.submit(SimRequest(1, 30, 5, 10, 1, 0, 1), 0.0)
    assert streams.next_at() == math.inf
    streams.add(1, 2, lambda tokens, step: None)
    streams.remove(1)
    assert streams.next_at() == math.inf


@pytest.mark.parametrize("kind", [SimInstance, ReferenceInstance])
def test_the_last_token_before_a_pause_is_streamed(kind: Kind) -> None:
    """All running requests are preempted with that very step, and decode no longer."""
    one = kind(InstanceSpec(cost=COST, kv_blocks=100))
    streams = TokenStreams(one)
    seen: list[tuple[float, int]] = []
    pauses = 0
    one.submit(SimRequest(1, 5, 9, 10, 1, 0, 1), 0.0)
    streams.add(1, 1, lambda tokens, step: seen.append((now, tokens)))
    while (now := min(one.next_at(), streams.next_at())) < math.inf:
        one.advance(now)
        streams.advance(now)
        if seen and not pauses:
            pauses += 1
            one.pause(now + 0.5, "keep", clear_cache=True)
    assert [tokens for _, tokens in seen] == [1, 2]
    assert one.progress(seen[-1][0]) == {1: 2}
