"""Laws of the scheduler in a hostile world, as a Hypothesis state machine.

The machine plays the world: instances join, die, lie, answer late, twice or not at all; the trainer
takes batches and publishes weights. After every event the scheduler's own invariants are checked,
and the machine keeps its own books from the actions alone:

* a request ends exactly once, delivered or discarded, and nothing about it follows;
* a client's request is answered without waiting for a batch, unless the client hung up;
* groups are delivered complete, and no sample is staler than the policy allows; if every version
  takes a batch and the policy waits, this costs no tokens;
* a judged group is delivered only if it was kept by an answer to the last question;
* a request that continues, on any instance, keeps all tokens that were made and not discarded;
* a batch goes in parts only to a trainer that takes parts, all under one version, and the last part
  completes it;
* no instance holds more requests than slots, gets work while it is closed, or runs two attempts of
  a request at once;
* all of this holds whether the scheduler or the trainer itself loads the weights;
* the trainer gets only instances without work, and is asked to return only instances that it has;
* in the end, when the world behaves, every group that neither failed nor was filtered is
  delivered;
* the same events, replayed through a new scheduler, give the same actions.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_sched.config import parse_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev

MAX_TOKENS = 50
SLOTS = 3

POLICIES = st.fixed_dictionaries(
    {
        "routing": st.sampled_from(
            [{"use": name} for name in ("round_robin", "random", "power_of_two", "least_requests")]
            + [{"use": "least_tokens"}, {"use": "session_affinity", "margin": 0}]
            + [{"use": "session_affinity", "shared_tokens": 20}]
            + [{"use": "vllm_internal_lb"}, {"use": "group_tokens", "shared_tokens": 20}]
        ),
        "ordering": st.sampled_from(
            [{"use": n} for n in ("fifo", "longest_first", "shortest_first", "resumed_first")]
        ),
        "admission": st.sampled_from(
            [{"use": "slots"}, {"use": "slots"}, {"use": "kv_tokens"}, {"use": "kv_growth"}]
            + [{"use": "aimd_concurrency", "longest": longest} for longest in (400, 10_000)]
            + [{"use": "session_cap"}, {"use": "session_cap", "fill": 0.1, "overfill": 0.05}]
        ),
        "prediction": st.sampled_from(
            [
                {"use": "none"},
                {"use": "group_history"},
                {"use": "group_history", "method": "censored", "quantile": 0.5},
                {"use": "prompt_history", "quantile": 0.5},
            ]
        ),
        "batching": st.sampled_from(
            [
                {"use": "sync"},
                {"use": "sync", "over_prompts": 2.0},
                {"use": "tail_batching", "over_prompts": 1.5, "over_samples": 1.5},
                {"use": "one_step_off"},
                {"use": "fully_async"},
                {"use": "fully_async", "max_groups": 3},
                {"use": "sync", "part_prompts": 1},
                {"use": "sync", "over_prompts": 2.0, "part_prompts": 2},
                {"use": "tail_batching", "over_prompts": 1.5, "part_prompts": 1},
                {"use": "one_step_off", "part_prompts": 1},
                {"use": "fully_async", "part_prompts": 1},
                {"use": "fully_async", "part_prompts": 2, "max_groups": 4},
                {"use": "fully_async", "max_ahead": 1.0},
                {"use": "fully_async", "max_ahead": 1.5},
                {"use": "fully_async", "max_ahead": 1.5, "window_fraction": 0.3},
                {"use": "fully_async", "max_ahead": 2, "window_fraction": 0.1, "part_prompts": 1},
            ]
        ),
        "selection": st.sampled_from(
            [{"use": "in_order"}]
            + [{"use": "like_lengths", "window": 2, "max_step_bias": bias} for bias in (0, 0.5, 1)]
            + [{"use": "like_lengths", "window": 3, "order": "longest_first"}]
        ),
        "freshness": st.sampled_from(
            [
                {"use": "unbounded"},
                {"use": "bounded", "max_staleness": 0},
                {"use": "bounded", "max_staleness": 1},
                {"use": "bounded", "max_staleness": 2, "when_stale": "drop"},
                {"use": "bounded", "max_staleness": 0, "when_stale": "mask"},
                {"use": "bounded", "max_staleness": 1, "when_stale": "mask"},
            ]
        ),
        "interruption": st.sampled_from(
            [{"use": "none"}]
            + [
                {"use": "partial", "kv": kv, "at_update": at, **segment}
                for kv in ("retain", "recompute")
                for at in ("in_place", "resubmit", "drain")
                for segment in (
                    {},
                    {"segment_tokens": 7},
                    {"segment_tokens": 7, "segment": "chunk"},
                )
            ]
        ),
        "weights": st.sampled_from(
            [{"use": "all_at_once"}, {"use": "all_at_once", "when": "between_batches"}]
            + [{"use": "rolling", "at_once": n} for n in (1, 2)]
        ),
        "migration": st.sampled_from(
            [
                {"use": "none"},
                {"use": "tests.helpers:Restless"},
                {"use": "tests.helpers:Restless", "interval_s": 1.0},
                {"use": "by_cost", "context_s": 1.0, "interval_s": 0.5, "most": 5},
                {"use": "repack", "interval_s": 0.5, "most": 5},
            ]
        ),
        "lending": st.sampled_from(
            [
                {"use": "none"},
                {"use": "tests.helpers:Generous"},
                {"use": "stage_fusion", "whole": 0.3, "slowdown": 9.0},
            ]
        ),
    }
)


class World(RuleBasedStateMachine):
    """Everything outside the scheduler, with its own books."""

    @initialize(
        policy=POLICIES,
        prompts_per_step=st.integers(1, 4),
        instances=st.integers(1, 3),
        parts=st.booleans(),
        shares_gpus=st.booleans(),
        version=st.sampled_from([0, 0, 5]),
    )
    def start(self, policy, prompts_per_step, instances, parts, shares_gpus, version):
        if policy["batching"]["use"] == "one_step_off":
            assume(policy["freshness"].get("max_staleness", 1) > 0)
        self.policy = parse_policy("machine", policy)
        self.bound = policy["freshness"].get("max_staleness")
        self.prompts_per_step = prompts_per_step
        self.scheduler = self.policy.scheduler(prompts_per_step, version=version, seed=1)
        self.journal = []
        self.now = 0.0
        self.running: dict[int, act.Dispatch] = {}
        self.made: Counter[str] = Counter()  # tokens that we have of a request
        self.streamed: Counter[int] = Counter()  # tokens that we already have of an attempt
        self.over: list[ev.Event] = []
        self.told_to_stop: set[int] = set()
        self.acting: list[ev.ToolReturned] = []
        self.held: dict[str, list[int]] = defaultdict(list)
        self.pausing: list[act.Pause] = []
        self.updating: list[act.UpdateWeights] = []
        self.closed_instances: set[str] = set()
        self.shut: set[str] = set()  # by others
        self.around = False  # the trainer loads the newest weights itself
        self.groups: dict[str, int] = {}
        self.ended: Counter[str] = Counter()
        self.failed: set[str] = set()
        self.least: dict[str, int] = {}
        self.short: Counter[str] = Counter()  # samples that failed alone
        self.filtered: set[str] = set()
        self.judged: set[str] = set()
        self.judging: dict[str, int] = {}  # by group, the last question
        self.kept: set[str] = set()
        self.delivered: set[str] = set()
        self.asked: list[str] = []
        self.leaving: set[str] = set()
        self.lent: set[str] = set()
        self.reclaimed: set[str] = set()
        self.shares_gpus = shares_gpus
        self.training = False
        self.version = self.first_version = version
        # Rounds that keep nothing may have more complete groups than their batch takes.
        keeps = policy["interruption"]["use"] == "partial"
        self.waits = policy["freshness"].get("when_stale") != "drop" and (
            policy["batching"]["use"] == "fully_async" or keeps
        )
        self.takes_parts = False
        self.batches = self.parts = self.in_batch = 0
        self.names = 0
        self.submissions_closed = False
        for _ in range(instances):
            self.join()
        self.request(parts)

    # -- the wire --------------------------------------------------------------------------

    def tell(self, event):
        self.sound = False
        self.now += 0.25
        self.journal.append((self.now, event))
        answer = self.scheduler.handle(event, self.now)
        self.answers = [*getattr(self, "answers", []), answer]
        for action in answer:
            getattr(self, f"on_{type(action).__name__.lower()}")(action)
        self.sound = True

    def on_dispatch(self, action):
        assert action.instance in self.held
        assert action.instance not in self.closed_instances, "work sent to a closed instance"
        assert action.instance not in self.shut, "work sent to an instance that others control"
        assert action.instance not in self.leaving, "work sent to a leaving instance"
        assert self.ended[action.request] == 0, "an ended request was dispatched"
        assert action.attempt not in self.running
        assert action.max_new_tokens >= 1
        owners = [
            d
            for d in self.running.values()
            if d.request == action.request and d.attempt not in self.told_to_stop
        ]
        assert not owners, "two attempts of one request at once"
        assert action.response_tokens == self.made[action.request], "tokens were lost"
        self.running[action.attempt] = action
        self.held[action.instance].append(action.attempt)
        assert len(self.held[action.instance]) <= SLOTS, "more requests than slots"

    def on_interrupt(self, action):
        assert action.attempt in self.running
        self.told_to_stop.add(action.attempt)

    def on_pause(self, action):
        self.closed_instances.add(action.instance)
        self.pausing.append(action)
        if action.mode == "abort":
            self.told_to_stop.update(self.held[action.instance])

    def on_updateweights(self, action):
        self.closed_instances.add(action.instance)
        assert action.version <= self.version
        assert not self.around, "an order to load weights that the trainer loads"
        self.updating.append(action)

    def on_resume(self, action):
        assert action.instance in self.held
        self.closed_instances.discard(action.instance)

    def on_release(self, action):
        assert action.instance in self.leaving
        assert not self.held[action.instance], "released with work in flight"

    def on_lend(self, action):
        assert self.shares_gpus, "lent to a trainer that cannot take it"
        assert not self.held[action.instance], "lent with work in flight"
        assert action.instance not in self.lent | self.leaving
        self.lent.add(action.instance)
        self.closed_instances.add(action.instance)

    def on_reclaim(self, action):
        assert action.instance in self.lent - self.reclaimed
        self.reclaimed.add(action.instance)

    def on_deliver(self, action):
        assert not self.training, "a batch without a request for it"
        assert action.version == self.version
        assert (action.batch, action.part) == (self.batches, self.parts)
        members = defaultdict(set)
        for sample in action.samples:
            self.end(sample.request)
            members[sample.group].add(sample.index)
            if self.bound is not None:
                assert sample.staleness <= self.bound, f"{sample} is too old"
            self.check_mask(sample, action.version)
            assert sum(s.tokens for s in sample.segments) == sample.response_tokens
            assert sample.response_tokens == self.made[sample.request] <= MAX_TOKENS
        for group, indices in members.items():
            self.check_whole(group, len(indices))
            assert group not in self.delivered
            assert group not in self.judged or group in self.kept, "not kept"
            self.delivered.add(group)
        self.in_batch += len(members)
        if action.last:
            assert self.in_batch == self.prompts_per_step or self.submissions_closed
            self.training = True
            self.batches += 1
            self.parts = self.in_batch = 0
        else:
            assert self.takes_parts, "a part for a trainer that takes no parts"
            assert len(members) > 0, "an empty part"
            assert self.in_batch < self.prompts_per_step
            self.parts += 1

    def on_discard(self, action):
        assert action.tokens >= 0
        assert action.reason != "stale" or not self.waits, "a sample was not delivered in time"
        self.made[action.request] -= action.tokens
        if action.ends:
            self.end(action.request)
            if action.reason == "failed" and action.request not in self.asked:
                self.failed.add(action.request.rpartition("/")[0])
            if action.reason == "sample_failed":
                self.short[action.group] += 1
            if action.reason == "filtered":
                self.filtered.add(action.request.rpartition("/")[0])

    def check_whole(self, group, samples):
        least, asked = self.least[group], self.groups[group]
        assert (least or asked) <= samples <= asked, "a group was delivered in part"
        assert samples >= asked - self.short[group]
        assert least or not self.short[group]

    def on_judge(self, action):
        assert action.group in self.judged, "a group that needs no judgement"
        assert action.judgement > self.judging.get(action.group, 0), "a repeated number"
        indices = {sample.index for sample in action.samples}
        assert len(indices) == len(action.samples)
        self.check_whole(action.group, len(indices))
        assert not any(self.ended[sample.request] for sample in action.samples)
        self.judging[action.group] = action.judgement
        self.kept.discard(action.group)

    def on_answer(self, action):
        assert action.sample.request in self.asked, "an answer to an unknown request"
        assert sum(s.tokens for s in action.sample.segments) == action.sample.response_tokens
        self.end(action.sample.request)

    def on_wake(self, action):
        assert action.at > self.now

    def check_mask(self, sample, version):
        """Check that exactly the tokens that are too old are masked out."""
        masks = self.policy.roles["freshness"][1].get("when_stale") == "mask"
        for segment in sample.segments:
            too_old = masks and segment.version < version - self.bound
            assert segment.masked == too_old
        masked = sum(segment.tokens for segment in sample.segments if segment.masked)
        assert sample.masked_tokens == masked

    def end(self, request):
        self.ended[request] += 1
        assert self.ended[request] == 1, f"{request} ended twice"

    # -- rules of an honest world ----------------------------------------------------------

    @precondition(lambda self: len(self.held) < 4)
    @rule(lag=st.integers(0, 2))
    def join(self, lag=0):
        self.names += 1
        name = f"i{self.names}"
        self.held[name] = []
        self.tell(ev.InstanceJoined(name, SLOTS, 1000, self.version_of_a_newcomer(lag)))

    def version_of_a_newcomer(self, lag):
        """The version of a joining instance; if the trainer loads weights itself, instances with
        older ones do not join."""
        return self.version if self.around else max(0, self.version - lag)

    @precondition(lambda self: not self.submissions_closed)
    @rule(
        samples=st.integers(1, 3),
        prompt=st.integers(1, 40),
        judged=st.booleans(),
        resumable=st.booleans(),
        least=st.integers(0, 3),
    )
    def submit(self, samples, prompt, judged, resumable, least):
        number = len(self.groups)
        name, known = f"g{number}", tuple(range(number % 3))
        self.groups[name] = samples
        self.least[name] = least = min(least, samples)
        named = f"p{number % 4}" if number % 4 else ""
        if judged:
            self.judged.add(name)
        event = ev.GroupSubmitted(
            name, samples, prompt, MAX_TOKENS, named, known, number % 2, judged, resumable, least
        )
        self.tell(event)

    @precondition(lambda self: self.judging)
    @rule(data=st.data(), verdict=st.sampled_from(["kept", "kept", "filtered", "failed"]))
    def judge(self, data, verdict):
        """Answer also for a group that has started over: then the answer no longer counts."""
        group = data.draw(st.sampled_from(sorted(self.judging)))
        self.say(group, verdict)

    def say(self, group, verdict):
        asked = self.scheduler.view.is_judged(group, self.judging[group])
        before = self.scheduler.state.anomalies.total()
        if asked and verdict == "kept":
            self.kept.add(group)
        self.tell(ev.GroupJudged(group, self.judging[group], verdict))
        assert self.scheduler.state.anomalies.total() == before + (not asked)
        assert (group in self.filtered) >= (asked and verdict == "filtered")
        assert (group in self.failed) >= (asked and verdict == "failed")
        del self.judging[group]

    @precondition(lambda self: self.judging)
    @rule(data=st.data(), by=st.integers(-2, 2))
    def judge_wrongly(self, data, by):
        group = data.draw(st.sampled_from(sorted(self.judging)))
        judgement = self.judging[group] + by
        if by and not self.scheduler.view.is_judged(group, judgement):
            before = self.scheduler.state.anomalies.total()
            self.tell(ev.GroupJudged(group, judgement, "kept"))
            assert self.scheduler.state.anomalies.total() == before + 1

    @rule(
        prompt=st.integers(1, 3),
        sibling=st.integers(0, 2),
        session=st.sampled_from(["", "s"]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        client=st.sampled_from(["", "k1", "k2"]),
    )
    def ask(self, prompt, sibling, session, priority, client):
        name = f"d{len(self.asked)}"
        self.asked.append(name)
        asked = ev.RequestSubmitted(name, f"p{sibling}", prompt, MAX_TOKENS, session, priority)
        self.tell(msgspec.structs.replace(asked, client=client))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        """It ends at once unless it runs, and then with its attempt."""
        name = data.draw(st.sampled_from(self.asked))
        request = self.scheduler.parts.requests.get(name)
        runs = request is not None and request.attempt is not None
        before, ended = self.scheduler.state.anomalies.total(), self.ended[name]
        self.tell(ev.RequestAborted(name))
        assert self.ended[name] == (not runs)
        assert self.scheduler.state.anomalies.total() == before + ended

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def hang_up(self, data):
        name = data.draw(st.sampled_from(self.asked))
        before, ended = self.scheduler.state.anomalies.total(), self.ended[name]
        self.tell(ev.RequestWithdrawn(name))
        assert self.ended[name] == 1
        assert self.scheduler.state.anomalies.total() == before + ended

    @precondition(lambda self: any(self.asked))
    @rule()
    def end_session(self):
        self.tell(ev.SessionEnded("s"))

    @precondition(lambda self: len(self.groups) > 4 and not self.submissions_closed)
    @rule()
    def close(self):
        self.submissions_closed = True
        self.tell(ev.SubmissionsClosed())

    @precondition(lambda self: self.training)
    @rule(parts=st.booleans())
    def train(self, parts=True):
        self.training = self.around = False
        self.version += 1
        self.tell(ev.WeightsPublished(self.version))
        self.request(parts)

    @precondition(lambda self: not self.training and not self.in_batch)
    @rule(by=st.integers(1, 2))
    def publish_without_training(self, by):
        """Like a trainer that loads a checkpoint."""
        self.version += by
        self.waits = self.around = False
        self.tell(ev.WeightsPublished(self.version))

    @precondition(lambda self: not self.training)
    @rule(by=st.integers(1, 2))
    def load_around_us(self, by):
        """The trainer starts to load weights into the instances itself, at any time."""
        self.version += by
        self.waits, self.around = False, True
        self.tell(ev.WeightsPublished(self.version, loads=False))

    @precondition(lambda self: self.around and not self.in_batch)
    @rule()
    def say_how_to_load(self):
        """The scheduler loads the newest version, which the trainer has loaded into some."""
        self.around = False
        self.tell(ev.WeightsPublished(self.version))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def find_new_weights(self, data):
        self.find(data.draw(st.sampled_from(sorted(self.held))))

    def find(self, name):
        """Unless the scheduler is loading it: then this would be the answer to that load."""
        ordered = [action.instance for action in self.updating]
        if name in ordered:
            return
        if self.scheduler.state.fleet.instances[name].version < self.version:
            before = self.scheduler.state.anomalies.total()
            self.tell(ev.WeightsUpdated(name, self.version))
            assert self.scheduler.state.fleet.instances[name].version == self.version
            assert self.scheduler.state.anomalies.total() == before

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def take_in_hand(self, data):
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.shut.add(name)
        self.tell(ev.GateClosed(name))

    @precondition(lambda self: self.shut)
    @rule(data=st.data())
    def let_go(self, data):
        name = data.draw(st.sampled_from(sorted(self.shut)))
        self.shut.discard(name)
        self.tell(ev.GateOpened(name))

    @precondition(lambda self: not self.training)
    @rule(parts=st.booleans())
    def request(self, parts):
        """Ask, also again: a trainer that broke off may ask at any time."""
        self.takes_parts = parts
        self.tell(ev.BatchRequested(parts, self.shares_gpus))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), share=st.floats(0, 1), kind=st.sampled_from(["stop", "turn", "length"]))
    def answer(self, data, share, kind):
        attempt = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.running[attempt]
        tokens = max(1, round(share * dispatch.max_new_tokens))
        if kind == "length":
            tokens = dispatch.max_new_tokens
        self.finish(attempt, tokens, kind)

    def finish(self, attempt, tokens, kind):
        dispatch = self.take(attempt)
        self.made[dispatch.request] += tokens
        if kind == "turn":
            event = ev.TurnFinished(dispatch.request, attempt, tokens)
            self.acting.append(ev.ToolReturned(dispatch.request, attempt, 5))
        elif kind == "interrupted":
            event = ev.RequestInterrupted(dispatch.request, attempt, tokens)
        else:
            event = ev.RequestFinished(dispatch.request, attempt, tokens, reason=kind)
        self.over.append(event)
        self.tell(event)

    def take(self, attempt):
        """An attempt has ended and releases its slot."""
        dispatch = self.running.pop(attempt)
        self.held[dispatch.instance].remove(attempt)
        self.told_to_stop.discard(attempt)
        return dispatch

    @precondition(lambda self: self.told_to_stop)
    @rule(data=st.data(), share=st.floats(0, 1))
    def stop(self, data, share):
        attempt = data.draw(st.sampled_from(sorted(self.told_to_stop)))
        most = self.running[attempt].max_new_tokens - 1
        self.finish(attempt, round(share * most), "interrupted")

    @precondition(lambda self: self.running)
    @rule(data=st.data(), share=st.floats(0, 1))
    def stream(self, data, share):
        attempt = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.running[attempt]
        tokens = round(share * dispatch.max_new_tokens)
        # Tokens of an abandoned attempt are discarded when it ends.
        self.streamed[attempt] = max(tokens, self.streamed[attempt])
        self.tell(ev.TokensArrived(dispatch.request, attempt, tokens))

    @precondition(lambda self: self.acting)
    @rule(data=st.data())
    def tool(self, data):
        event = data.draw(st.sampled_from(self.acting))
        self.acting.remove(event)
        self.over.append(event)
        self.tell(event)

    @precondition(lambda self: self.acting)
    @rule(data=st.data(), reason=st.sampled_from(["stop", "length", "failed"]))
    def last_turn(self, data, reason):
        returned = data.draw(st.sampled_from(self.acting))
        self.acting.remove(returned)
        event = ev.TrajectoryEnded(returned.request, returned.attempt, reason)
        self.over.append(event)
        self.tell(event)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), usage=st.floats(0, 1), more=st.integers(0, 2))
    def report(self, data, usage, more):
        name = data.draw(st.sampled_from(sorted(self.held)))
        running = len(self.held[name])
        before = self.scheduler.state.fleet.instances[name].report
        preemptions = more // 2 + (before.preemptions if before else 0)
        self.tell(ev.InstanceReported(name, running, more, usage, preemptions))

    @precondition(lambda self: self.pausing)
    @rule()
    def paused(self):
        event = ev.InstancePaused(self.pausing.pop(0).instance)
        self.over.append(event)
        self.tell(event)

    @precondition(lambda self: self.updating)
    @rule()
    def updated(self):
        action = self.updating.pop(0)
        self.closed_instances.discard(action.instance)
        event = ev.WeightsUpdated(action.instance, action.version)
        self.over.append(event)
        self.tell(event)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def return_instance(self, data):
        self.returned(data.draw(st.sampled_from(sorted(self.lent))))

    def returned(self, name):
        self.forget_loan(name)
        self.closed_instances.discard(name)
        event = ev.InstanceReturned(name)
        self.over.append(event)
        self.tell(event)

    def forget_loan(self, name):
        self.lent.discard(name)
        self.reclaimed.discard(name)

    @precondition(lambda self: len(self.held) - len(self.leaving) > 1)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(set(self.held) - self.leaving)))
        self.leaving.add(name)
        self.tell(ev.InstanceLeaving(name))

    # -- rules of a hostile world ----------------------------------------------------------

    @precondition(lambda self: len(self.held) - len(self.leaving) > 1 or self.leaving)
    @rule(data=st.data())
    def lose(self, data):
        staying = sorted(set(self.held) - self.leaving)
        name = data.draw(st.sampled_from(sorted(self.leaving) + staying[1:]))
        self.leaving.discard(name)
        for attempt in self.held.pop(name):
            dispatch = self.running.pop(attempt)
            self.told_to_stop.discard(attempt)
            self.made[dispatch.request] += self.streamed[attempt]
            # Its answer may still be on the wire.
            self.over.append(ev.RequestFinished(dispatch.request, attempt, 1))
        self.pausing = [action for action in self.pausing if action.instance != name]
        self.updating = [action for action in self.updating if action.instance != name]
        self.closed_instances.discard(name)
        self.shut.discard(name)
        self.forget_loan(name)
        self.tell(ev.InstanceLost(name))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        blame=st.sampled_from(["unclear", "unclear", "unclear", "instance", "request", "nobody"]),
        usable=st.booleans(),
    )
    def fail(self, data, blame, usable):
        attempt = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.take(attempt)
        self.made[dispatch.request] += self.streamed[attempt]
        event = ev.RequestFailed(dispatch.request, attempt, "500", blame, usable)
        self.over.append(event)
        self.tell(event)

    @rule()
    def wake(self):
        self.now += 100
        self.tell(ev.Woke())

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def repeat(self, data):
        before = self.scheduler.state.anomalies.total()
        event = data.draw(st.sampled_from(self.over))
        if isinstance(event, ev.WeightsUpdated | ev.InstancePaused | ev.InstanceReturned):
            return  # it may be true again by now: see `confirm_twice`
        self.tell(event)
        assert self.scheduler.state.anomalies.total() == before + 1

    @precondition(lambda self: not self.pausing and not self.updating)
    @rule(data=st.data())
    def confirm_twice(self, data):
        before = self.scheduler.state.anomalies.total()
        name = data.draw(st.sampled_from([*sorted(self.held), "nobody"]))
        known = self.scheduler.view.instance(name)
        self.tell(ev.InstancePaused(name))
        self.tell(ev.WeightsUpdated(name, self.version if known is None else known.version))
        assert self.scheduler.state.anomalies.total() == before + 2

    @precondition(lambda self: self.running)
    @rule(data=st.data(), wrong=st.sampled_from(["request", "attempt"]))
    def confuse(self, data, wrong):
        attempt = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running[attempt].request
        if wrong == "request":
            request += "?"
        else:
            attempt += 100_000
        self.tell(ev.RequestFinished(request, attempt, 3))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.sampled_from([-5, 0, 10_000]), lie=st.booleans())
    def lie(self, data, tokens, lie):
        attempt = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.take(attempt)
        self.made[dispatch.request] += min(max(0, tokens), dispatch.max_new_tokens)
        spans = ((self.version + 7, 1),) if lie else ()
        event = ev.RequestFinished(dispatch.request, attempt, tokens, spans)
        self.over.append(event)
        self.tell(event)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def ask_the_impossible(self, data):
        known = sorted(group.id for group in self.scheduler.state.groups)
        asked = sorted(request.id for request in self.scheduler.parts.requests)
        wrong = [
            ev.GroupSubmitted("too large", 1, 10_000, MAX_TOKENS),
            ev.GroupSubmitted("empty", 0, 1, MAX_TOKENS),
            ev.WeightsPublished(self.version, loads=not self.around),
        ]
        if self.in_batch:
            wrong.append(ev.WeightsPublished(self.version + 1))
        wrong += [ev.GroupSubmitted(name, 1, 1, MAX_TOKENS) for name in known[:1]]
        wrong += [ev.RequestSubmitted(name, "", 1, MAX_TOKENS) for name in asked[:1]]
        wrong += [ev.RequestSubmitted("nothing", "", 0, MAX_TOKENS)]
        event = data.draw(st.sampled_from(wrong))
        if event == wrong[0] and not self.held:
            return
        with pytest.raises(CallerError):
            self.scheduler.handle(event, self.now)

    # -- the laws --------------------------------------------------------------------------

    @invariant()
    def books_add_up(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self):
        if not getattr(self, "sound", False):
            return
        self.behave()
        self.scheduler.check_invariants()
        assert not self.scheduler.parts.requests
        assert not self.running
        assert all(self.ended[name] for name in self.asked)
        assert self.delivered | self.lost == set(self.groups)
        assert not self.delivered & self.lost
        assert not self.failed & self.filtered
        again = self.policy.scheduler(self.prompts_per_step, version=self.first_version, seed=1)
        assert [again.handle(event, now) for now, event in self.journal] == self.answers

    @property
    def lost(self):
        return self.failed | self.filtered

    def behave(self):
        """Answer everything, in order, until nothing is left to answer."""
        if not self.submissions_closed:
            self.close()
        for turn in range(5000):
            over = self.delivered | self.lost == set(self.groups)
            if over and not self.running and not self.scheduler.parts.requests:
                return
            fleet = self.scheduler.state.fleet.instances
            behind = [name for name in self.held if fleet[name].version < self.version]
            if self.pausing:
                self.paused()
            elif self.shut:
                self.tell(ev.GateOpened(self.shut.pop()))
            elif self.around and behind and not self.updating:
                self.find(behind[0])
            elif self.updating:
                self.updated()
            elif self.reclaimed or (self.lent and self.training):
                self.returned(min(self.reclaimed or self.lent))
            elif self.told_to_stop:
                self.finish(min(self.told_to_stop), 0, "interrupted")
            elif self.acting:
                self.tell(self.acting.pop())
            elif self.judging and turn % 2:
                self.say(min(self.judging), "kept")
            elif self.running and (turn % 3 or not self.training):
                oldest = min(self.running)
                # Each up to its limit, which may be that of a segment.
                kind = "length" if turn % 2 else "stop"
                self.finish(oldest, self.running[oldest].max_new_tokens, kind)
            elif self.training:
                self.train()
            else:
                self.wake()
        raise AssertionError("the run does not end")


World.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_world = World.TestCase
