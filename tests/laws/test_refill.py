"""Laws of refill: under every batching, exactly one other group replaces each lost group.

An honest world with enough prompts: requests finish or fail, groups are kept, filtered or cannot be
judged, weights are updated. Then

* a batch has exactly the planned number of groups, until nothing is left; then it reports how many
  are missing;
* a round keeps its launched size, whatever it loses: launches = the round + losses; without rounds,
  as many groups may be open as before;
* no sample is staler than allowed, and only kept groups are delivered.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from tests.core.told import LIMIT, PROMPT, make_scheduler

SIZE = 3
GROUPS = 24

PARTIAL = {"use": "partial", "at_update": "resubmit"}

#: Batchings, each with a suitable bound on staleness.
POLICIES: dict[str, dict[str, Any]] = {
    "sync": {"batching": "sync"},
    "over": {"batching": {"use": "sync", "over_prompts": 2.0}},
    "over_partial": {
        "batching": {"use": "sync", "over_prompts": 2.0},
        "interruption": PARTIAL,
        "freshness": {"max_staleness": 2},
    },
    "parts": {"batching": {"use": "sync", "over_prompts": 1.5, "part_prompts": 1}},
    "tail": {"batching": {"use": "tail_batching", "over_prompts": 1.5, "over_samples": 1.5}},
    "pooled": {"batching": {"use": "pooled", "batches": 2}, "freshness": "unbounded"},
    "one_step_off": {"batching": "one_step_off", "freshness": {"max_staleness": 1}},
    "async": {
        "batching": "fully_async",
        "freshness": {"max_staleness": 2},
        "interruption": PARTIAL,
    },
    "ahead": {
        "batching": {"use": "fully_async", "max_ahead": 2.0, "part_prompts": 1},
        "freshness": {"max_staleness": 3},
        "interruption": PARTIAL,
    },
    "drop": {
        "batching": {"use": "fully_async", "max_ahead": 2.0},
        "freshness": {"max_staleness": 1, "when_stale": "drop"},
        "interruption": PARTIAL,
    },
}
ROUNDS = {"sync", "over", "over_partial", "parts", "tail", "pooled", "one_step_off"}

#: Possible next events; impossible ones are skipped.
STEPS = ["finish"] * 8 + ["break", "keep", "keep", "filter", "fail", "train"]


class World:
    def __init__(self, name: str) -> None:
        self.name = name
        self.roles = POLICIES[name]
        self.scheduler = make_scheduler(SIZE, **self.roles)
        self.now = 0.0
        self.version = 0
        self.training = False
        self.running: dict[int, act.Dispatch] = {}
        self.stopping: set[int] = set()
        self.asked: list[act.Judge] = []
        self.kept: set[str] = set()
        self.lost: set[str] = set()
        self.batches: list[list[str]] = [[]]
        self.missing = 0
        self.tell(ev.InstanceJoined("i", 256, 100_000))
        for number in range(GROUPS):
            self.tell(ev.GroupSubmitted(f"g{number}", 2, PROMPT, LIMIT, judged=number % 4 > 0))
        self.tell(ev.BatchRequested(parts=True))

    def tell(self, event: ev.Event) -> None:
        before = self.size()
        self.now += 1.0
        delivered = False
        actions = self.scheduler.handle(event, self.now)
        for action in actions:
            delivered |= isinstance(action, act.Deliver) and action.last
            getattr(self, f"on_{type(action).__name__.lower()}", lambda action: None)(action)
        after = self.size()
        if not delivered and before is not None and self.plenty:
            assert after == before, f"{event}: a round of {before} groups has {after}"
        # The orders of an update are carried out at once.
        for action in actions:
            if isinstance(action, act.Pause):
                self.tell(ev.InstancePaused("i"))
            elif isinstance(action, act.UpdateWeights):
                self.tell(ev.WeightsUpdated("i", action.version))
        while stopping := self.stopping & self.running.keys():
            attempt = min(stopping)
            sent = self.running.pop(attempt)
            self.tell(ev.RequestInterrupted(sent.request, attempt, 1))

    @property
    def plenty(self) -> bool:
        """Whether there are prompts to replace lost groups."""
        return self.scheduler.state.progress.fresh > 0

    def size(self) -> int | None:
        """The size that must stay constant: that of the round; None without one."""
        progress = self.scheduler.state.progress
        if self.name in ROUNDS:
            return None if progress.round is None else progress.in_progress
        return None

    def on_dispatch(self, action: act.Dispatch) -> None:
        self.running[action.attempt] = action

    def on_interrupt(self, action: act.Interrupt) -> None:
        self.stopping.add(action.attempt)

    def on_pause(self, action: act.Pause) -> None:
        if action.mode == "abort":
            self.stopping.update(self.running)

    def on_judge(self, action: act.Judge) -> None:
        self.kept.discard(action.group)
        self.asked.append(action)

    def on_discard(self, action: act.Discard) -> None:
        if action.reason in ("failed", "filtered") and action.ends:
            self.lost.add(action.group)

    def on_deliver(self, action: act.Deliver) -> None:
        bound = self.scheduler.roles.freshness.oldest_allowed(action.version)
        groups = list(dict.fromkeys(sample.group for sample in action.samples))
        for sample in action.samples:
            assert action.version - sample.staleness >= bound
        for group in groups:
            assert int(group[1:]) % 4 == 0 or group in self.kept
            assert group not in self.lost
        self.batches[-1] += groups
        if not action.last:
            assert not action.missing
            return
        assert len(self.batches[-1]) + action.missing == SIZE
        self.missing += action.missing
        self.training = True
        self.batches.append([])

    # -- possible events -------------------------------------------------------------------

    def finish(self, pick: int) -> None:
        attempt = self.pick(pick)
        if attempt is not None:
            sent = self.running.pop(attempt)
            self.tell(ev.RequestFinished(sent.request, attempt, min(sent.max_new_tokens, 5)))

    def cannot_be_made(self, pick: int) -> None:
        attempt = self.pick(pick)
        if attempt is not None:
            sent = self.running.pop(attempt)
            self.tell(ev.RequestFailed(sent.request, attempt, "", "request"))

    def pick(self, pick: int) -> int | None:
        running = sorted(self.running)
        return running[pick % len(running)] if running else None

    def judge(self, pick: int, verdict: Any) -> None:
        if self.asked:
            asked = self.asked.pop(pick % len(self.asked))
            if self.scheduler.view.is_judged(asked.group, asked.judgement):
                if verdict == "kept":
                    self.kept.add(asked.group)
                self.tell(ev.GroupJudged(asked.group, asked.judgement, verdict))

    def train(self) -> None:
        if self.training:
            self.training = False
            self.version += 1
            self.tell(ev.WeightsPublished(self.version))
            self.tell(ev.BatchRequested(parts=True))

    def step(self, what: str, pick: int) -> None:
        if what == "finish":
            self.finish(pick)
        elif what == "break":
            self.cannot_be_made(pick)
        elif what == "train":
            self.train()
        else:
            self.judge(pick, {"keep": "kept", "filter": "filtered", "fail": "failed"}[what])

    def end(self) -> None:
        """Submit no more prompts; everything left is delivered."""
        self.tell(ev.SubmissionsClosed())
        for _ in range(20_000):
            if not len(self.scheduler.state.groups):
                return
            if self.asked:
                self.judge(0, "kept")
            elif self.running:
                self.finish(0)
            else:
                self.train()
        raise AssertionError("the run does not end")


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 99)), max_size=120))
def test_lost_groups_are_replaced(name: str, steps: list[tuple[str, int]]) -> None:
    world = World(name)
    for what, pick in steps:
        world.step(what, pick)
    short = world.missing
    assert not short, "a batch was short before submissions were closed"
    world.scheduler.check_invariants()
    world.end()
    delivered = Counter(group for batch in world.batches for group in batch)
    assert set(delivered.values()) <= {1}
    assert set(delivered) | world.lost == {f"g{number}" for number in range(GROUPS)}
    assert not set(delivered) & world.lost
    assert world.missing == -len(delivered) % SIZE


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - ROUNDS))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 99)), max_size=120))
def test_without_rounds_all_allowed_groups_are_open(
    name: str, steps: list[tuple[str, int]]
) -> None:
    """After any losses, nothing more could be launched."""
    world = World(name)
    for what, pick in steps:
        world.step(what, pick)
        if world.plenty:
            progress, roles = world.scheduler.state.progress, world.scheduler.roles
            launch = roles.batching.launch(progress)
            asked = 0 if launch is None else launch.fresh + launch.deferred
            assert min(asked, roles.freshness.room(progress)) <= 0
