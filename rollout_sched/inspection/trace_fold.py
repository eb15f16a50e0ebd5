"""Makes a trace from a journal, so that the recorded run can be replayed under other policies."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from rollout_sched.core.model.actions import Answer, Deliver, Dispatch, Judge
from rollout_sched.core.model.events import (
    GroupJudged,
    GroupSubmitted,
    OfAttempt,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    Restored,
    TokensArrived,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
)
from rollout_sched.core.model.records import MAX_COUNT, DeliveredSample, GroupFacts, RequestFacts
from rollout_sched.core.model.request_ids import group_of, parse_request_id, request_id
from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.rounds import Round, find_rounds, round_figures
from rollout_sched.metrics.fold import Folded, Handler
from rollout_sched.simulators.traces.model import (
    VERDICT,
    Finish,
    Gatherer,
    SampleRecord,
    Trace,
    Turn,
)


@dataclass(slots=True)
class _Start:
    """What a sample generated from its first token on, before it ended or started over.

    `tokens` of its response, over all turns. `sure`: it is known to begin with the first token.
    """

    turns: list[Turn] = field(default_factory=list)
    tokens: int = 0
    finish: Finish = "cut"
    sure: bool = True

    def all_turns(self) -> tuple[Turn, ...]:
        """Its turns, at least one, with no tool call after the last."""
        left = self.tokens - sum([turn.output_tokens for turn in self.turns])
        if left > 0 or not self.turns:
            return (*self.turns, Turn(max(1, left)))
        return (*self.turns[:-1], Turn(self.turns[-1].output_tokens))


@dataclass(slots=True)
class _Sample:
    """`kept` response tokens precede those of the current attempt, which are at most `limit`."""

    prompt_tokens: int
    max_tokens: int
    arrival_s: float = 0.0
    starts: list[_Start] = field(default_factory=lambda: [_Start()])
    attempt: int = 0
    kept: int = 0
    limit: int = MAX_COUNT
    turn_ended_s: float = 0.0
    tool_returned: bool = False
    version: int | None = None

    def begin(self, attempt: int, kept: int, limit: int) -> None:
        self.attempt, self.kept, self.limit = attempt, kept, limit
        self.tool_returned = False

    def start_over(self, *, sure: bool = True) -> None:
        last = self.starts[-1]
        if last.tokens or last.turns:
            self.starts.append(_Start(sure=sure))

    def result(self) -> tuple[_Start, list[_Start]]:
        """The start that says most about the sample, and the others, further samples of the prompt.

        It is the first that finished. What comes after one that was cut takes its place if it is
        longer: the length of a response that is at least as long is distributed like any other
        length above this one. All the others count: those that took no one's place are the short
        ones, so without those that did and what they replaced, lengths would seem shorter.
        """
        best = self.starts[0]
        for start in self.starts[1:]:
            if best.finish == "cut" and start.tokens >= best.tokens:
                best = start
        others = [start for start in self.starts if start is not best and start.sure]
        # A replay may repeat a response, a real instance draws another.
        return best, [start for start in others if start.tokens and start.tokens != best.tokens]


@dataclass(slots=True)
class _Group:
    """`size`: samples that the trainer asked for; 0 for the requests of clients."""

    name: str
    size: int
    prompt_tokens: int
    max_tokens: int
    members: dict[int, _Sample] = field(default_factory=dict)
    verdict: str = ""

    def samples(self) -> Iterator[SampleRecord]:
        """Those asked for, those that the policy started beside them, and then further ones."""
        further: list[_Start] = []
        indices = sorted({*range(self.size), *self.members})
        for index in indices:
            member = self.members.get(index) or _Sample(self.prompt_tokens, self.max_tokens)
            best, others = member.result()
            further += others
            yield self._record(index, best, member)
        for index, start in enumerate(further, start=indices[-1] + 1):
            yield self._record(index, start, _Sample(self.prompt_tokens, self.max_tokens))

    def _record(self, index: int, start: _Start, of: _Sample) -> SampleRecord:
        return SampleRecord(
            self.name,
            index,
            of.prompt_tokens,
            start.all_turns(),
            arrival_s=of.arrival_s,
            finish=start.finish,
            version=of.version,
            labels={VERDICT: self.verdict} if self.verdict else {},
        )


class TraceFold:
    """Makes a trace of one journal, or of several that follow each other.

    A trace has every group that the trainer submitted, in this order, whatever became of it. A
    sample has the true length if it finished, even if it was discarded, and is else "cut" at the
    greatest length that it reached. Without groups, a trace has the requests of clients: each is a
    sample of the group that its client named, or its own group. If clients come in `rounds`, each
    round has its own groups and is a step; else the trace has the times at which they came.

    The actions tell from where an attempt continues. Without them, a sample of several attempts has
    the length of the longest, and is "cut".
    """

    def __init__(self, where: str, rounds: list[Round]) -> None:
        self._where = where
        self._rounds = rounds
        self._begins_s = [one.began_s for one in rounds]
        self._groups: list[_Group] = []
        self._submitted_groups: dict[str, _Group] = {}
        self._clients_groups: dict[tuple[int, str], _Group] = {}
        self._times: Counter[str] = Counter()
        self._newest_attempt = 0
        self._samples: dict[str, _Sample] = {}
        self._unknown: set[str] = set()
        self._first_s: float | None = None

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            GroupSubmitted: self._submitted,
            RequestSubmitted: self._asked,
            Restored: self._restored,
            Dispatch: self._begun,
            TokensArrived: self._of_attempt(self._tokens_arrived),
            RequestInterrupted: self._of_attempt(self._tokens_arrived),
            RequestFailed: self._of_attempt(self._failed),
            TurnFinished: self._of_attempt(self._turn_over),
            ToolReturned: self._of_attempt(self._tool_over),
            TrajectoryEnded: self._of_attempt(self._trajectory_over),
            RequestFinished: self._of_attempt(self._finished),
            GroupJudged: self._judged,
            Judge: self._whole,
            Deliver: self._whole,
            Answer: lambda now, action: self._made(action.sample),
        }

    def trace(self, name: str, prompts_per_step: int | None = None) -> tuple[Trace, list[str]]:
        """The trace, and what it lacks. `prompts_per_step`: of the trainer.

        Raises TraceError if nothing is in it.
        """
        asked = [group for group in self._groups if group.size]
        groups = asked or self._groups
        begun = groups[: max((n for n, g in enumerate(groups, start=1) if g.members), default=0)]
        gatherer = Gatherer(self._where)
        for group in begun:
            for sample in group.samples():
                gatherer.add(sample)
        lacks = {
            "groups of which nothing was started": len(groups) - len(begun),
            "groups and requests that were submitted before it": len(self._unknown),
            "groups of clients' requests, beside those of the trainer": len(self._groups)
            - len(groups),
        }
        members = gatherer.groups()
        steps = round_figures(self._rounds)
        samples = None if steps is None else steps.samples
        if asked:
            samples = Counter([group.size for group in begun]).most_common(1)[0][0]
        else:
            prompts_per_step = None if steps is None else steps.prompts
        trace = Trace(
            name,
            members,
            about="recorded by rollout_sched",
            max_response_tokens=max(group.max_tokens for group in begun) or None,
            prompts_per_step=prompts_per_step,
            samples_per_prompt=samples,
        )
        return trace, [f"{number} {what}" for what, number in lacks.items() if number]

    # -- groups and requests -------------------------------------------------------------------

    def _submitted(self, now: float, event: GroupSubmitted | GroupFacts) -> None:
        earlier = self._submitted_groups.get(event.group)
        if earlier is not None:  # its name is used again
            for index in earlier.members:
                self._samples.pop(request_id(event.group, index), None)
        self._submitted_groups[event.group] = self._open(
            event.group, event.samples, event.prompt_tokens, event.max_tokens
        )

    def _asked(self, now: float, event: RequestSubmitted) -> None:
        if self._first_s is None:
            self._first_s = now
        name = event.group or event.request
        key = bisect_right(self._begins_s, now), name
        group = self._clients_groups.get(key)
        if group is None:
            group = self._clients_groups[key] = self._open(name, 0, event.prompt_tokens, 0)
        group.max_tokens = max(group.max_tokens, event.max_tokens)
        arrival_s = 0.0 if self._rounds else max(0.0, now - self._first_s)
        sample = _Sample(event.prompt_tokens, event.max_tokens, arrival_s)
        sample.starts[-1].tokens = sum([segment.tokens for segment in event.prior_segments])
        group.members[len(group.members)] = self._samples[event.request] = sample

    def _open(self, name: str, size: int, prompt_tokens: int, max_tokens: int) -> _Group:
        self._times[name] += 1
        times = self._times[name]
        group = _Group(name if times == 1 else f"{name}@{times}", size, prompt_tokens, max_tokens)
        self._groups.append(group)
        return group

    def _restored(self, now: float, event: Restored) -> None:
        """Clients ask again; the trainer's groups continue, those of a missing journal, too."""
        for group in self._groups:
            if not group.size:
                finished = [m for m in group.members.values() if m.starts[-1].finish != "cut"]
                group.members = dict(enumerate(finished))
        self._groups = [group for group in self._groups if group.size or group.members]
        restored = sorted(event.state.groups, key=lambda facts: facts.serial)
        known = [f.serial for f in restored if f.group in self._submitted_groups]
        began_before = [f.serial + 1 for f in restored if f.group in self._unknown]
        first = min(known) if known else max(began_before, default=0)  # of this journal
        submitted, self._groups = self._groups, []
        for facts in restored:
            if facts.serial >= first:
                self._groups += submitted
                submitted = []
            if facts.group not in self._submitted_groups:
                self._submitted(now, facts)
            self._unknown.discard(facts.group)
            for request in facts.requests:
                if request.last_attempt:
                    self._restore(self._sample(request_id(facts.group, request.index)), request)
        self._groups += submitted

    @staticmethod
    def _restore(sample: _Sample | None, facts: RequestFacts) -> None:
        if sample is not None and not sample.attempt:
            sample.attempt = facts.last_attempt
            start = sample.starts[-1]
            start.tokens, start.finish = facts.response_tokens, _finish(facts.finish)

    def _judged(self, now: float, event: GroupJudged) -> None:
        group = self._submitted_groups.get(event.group)
        if group is not None and event.verdict != "failed":
            group.verdict = event.verdict

    def _sample(self, request: str) -> _Sample | None:
        """None if it was submitted before the journal begins."""
        sample = self._samples.get(request)
        if sample is not None:
            return sample
        group = self._submitted_groups.get(group_of(request))
        if group is None:
            self._unknown.add(group_of(request) or request)
            return None
        try:
            _, index = parse_request_id(request)
        except ValueError:
            return None
        sample = _Sample(group.prompt_tokens, group.max_tokens)
        group.members[index] = self._samples[request] = sample
        return sample

    # -- attempts ------------------------------------------------------------------------------

    def _begun(self, now: float, action: Dispatch) -> None:
        self._newest_attempt = action.attempt
        sample = self._sample(action.request)
        if sample is None:
            return
        if not action.response_tokens:
            sample.start_over()
        start = sample.starts[-1]
        del start.turns[action.turn :]
        start.tokens, start.finish = action.response_tokens, "cut"
        sample.begin(action.attempt, action.response_tokens, action.max_new_tokens)

    def _of_attempt(self, handle: Callable[[float, Any, _Sample], None]) -> Handler:
        """The handler of an event, called only if it is of the sample's newest attempt."""

        def handler(now: float, event: OfAttempt | ToolReturned | TrajectoryEnded) -> None:
            sample = self._sample(event.request)
            if sample is None:
                return
            if event.attempt > max(sample.attempt, self._newest_attempt):
                _begin_unseen(sample, event.attempt)
            if event.attempt == sample.attempt:
                handle(now, event, sample)

        return handler

    def _tokens_arrived(self, now: float, event: Any, sample: _Sample) -> None:
        sample.starts[-1].tokens = sample.kept + min(event.tokens, sample.limit)

    def _failed(self, now: float, event: RequestFailed, sample: _Sample) -> None:
        if not event.usable:
            sample.starts[-1].tokens = sample.kept

    def _turn_over(self, now: float, event: TurnFinished, sample: _Sample) -> None:
        self._tokens_arrived(now, event, sample)
        start = sample.starts[-1]
        before = sum([turn.output_tokens for turn in start.turns])
        start.turns.append(Turn(max(1, start.tokens - before)))
        sample.turn_ended_s = now

    def _tool_over(self, now: float, event: ToolReturned, sample: _Sample) -> None:
        turns = sample.starts[-1].turns
        if turns:
            took_s = round(max(0.0, now - sample.turn_ended_s), 6)
            turns[-1] = Turn(turns[-1].output_tokens, event.observation_tokens, took_s)
        sample.tool_returned = True

    def _trajectory_over(self, now: float, event: TrajectoryEnded, sample: _Sample) -> None:
        sample.starts[-1].finish = _finish(event.reason)

    def _finished(self, now: float, event: RequestFinished, sample: _Sample) -> None:
        self._tokens_arrived(now, event, sample)
        start = sample.starts[-1]
        spent = event.tokens >= sample.limit or sample.limit == MAX_COUNT  # it is not known
        goes_on = spent and start.tokens < sample.max_tokens
        if start.sure and not (event.reason == "length" and goes_on):
            start.finish = _finish(event.reason)

    def _whole(self, now: float, action: Judge | Deliver) -> None:
        for made in action.samples:
            self._made(made)

    def _made(self, made: DeliveredSample) -> None:
        sample = self._sample(made.request)
        if sample is not None:
            start = sample.starts[-1]
            start.tokens, start.finish = made.response_tokens, _finish(made.finish)
            sample.version = min((segment.version for segment in made.segments), default=None)


def recorded_trace(name: str, recordings: Sequence[Recording]) -> tuple[Trace, list[str]]:
    """The trace of the journals of one run, and what it lacks. One that begins in the middle of the
    run is read without actions.

    Raises JournalError, CallerError, TraceError.
    """
    recordings = sorted(recordings, key=lambda recording: recording.continues_at)
    rounds = find_rounds(chain.from_iterable(recording.events() for recording in recordings))
    fold = TraceFold(str(recordings[0].path), rounds)
    observe = Folded(fold).observe
    late = []
    for recording in recordings:
        if recording.begins_late:
            late.append(f"the events before {recording.path}")
            for now, event in recording.events():
                observe(now, event, ())
        else:
            recording.tell([observe])
    trace, lacks = fold.trace(name, recordings[-1].header.prompts_per_step)
    return trace, late + lacks


def _begin_unseen(sample: _Sample, attempt: int) -> None:
    """An attempt whose Dispatch is not known. It continues after a tool; after a cut it may."""
    if sample.attempt and not sample.tool_returned:
        sample.start_over(sure=False)
    sample.begin(attempt, sample.starts[-1].tokens, MAX_COUNT)


def _finish(reason: str) -> Finish:
    match reason:
        case "stop" | "length":
            return reason
    return "cut"
