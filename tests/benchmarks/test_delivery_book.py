"""What a trainer was given against what it asked for."""

from __future__ import annotations

from benchmarks.live.delivery_book import DeliveryBook
from rollout_sched.client import Batch, FailedGroup, Prompt, Sample


def prompt(uid, *lengths):
    each = [{"extra_args": {"fake_response_tokens": tokens}} for tokens in lengths]
    return Prompt(uid, [1], samples=2, max_tokens=99, each=each)


def sample(uid, index, tokens):
    ids = [7] * tokens
    return Sample(uid, index, [1], ids, ids, None, [0] * tokens, [], 0, "stop", "COMPLETED", 0)


def batch(*samples, failed=()):
    return Batch(0, 0, list(samples), list(failed))


def book():
    return DeliveryBook([prompt("a", 3, 4, 5, 6), prompt("b", 1, 2, 3, 4)])


def test_all_there_once_and_as_long_as_told():
    kept = book()
    kept.enter(batch(sample("a", 0, 3), sample("a", 1, 4)))
    assert kept.outstanding == {"b"}
    kept.enter(batch(sample("b", 1, 2), sample("b", 3, 4)))  # 3 was over-sampled
    assert not kept.outstanding
    assert kept.failures == []


def test_what_never_came():
    kept = book()
    kept.enter(batch(sample("a", 0, 3), sample("a", 1, 4)))
    assert kept.failures == ["b: never delivered"]


def test_what_came_twice():
    kept = book()
    for _ in range(2):
        kept.enter(batch(sample("a", 0, 3), sample("a", 1, 4)))
    assert kept.failures[0].startswith("a: delivered twice")


def test_a_group_that_is_not_whole():
    kept = book()
    kept.enter(batch(sample("a", 0, 3)))
    kept.enter(batch(sample("b", 1, 2), sample("b", 1, 2)))
    assert kept.failures == ["a: 1 samples, not 2", "b: 1 samples, not 2"]


def test_another_length_than_told():
    kept = book()
    kept.enter(batch(sample("a", 0, 3), sample("a", 1, 9)))
    assert kept.failures[0] == "a/1: 9 tokens, not 4"


def test_a_group_that_failed():
    kept = book()
    kept.enter(batch(failed=[FailedGroup("a", "refused")]))
    assert kept.failures == ["a: refused", "a: never delivered", "b: never delivered"]
