"""Verified resume: tokens that older weights made are kept as far as newer weights accept them.

A request that was interrupted or set back must be prefilled again before it can go on, and that
prefill gives the probabilities of its tokens under the new weights. So the tokens are used as the
*draft* of speculative decoding (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318):
the longest prefix whose tokens pass its test is kept, and the rest is generated again. Kept tokens
are distributed as if the new weights had made them, so they count as theirs. SPEC-RL (arXiv
2509.23232) does this with the responses of earlier epochs, inside a trainer.

The driver has the tokens, so it makes the test and draws the random numbers: a Dispatch names the
draft, a PrefixVerified says how much of it was kept. With verification, waiting requests hold no
old tokens, because these are tested first: a group is as old as its finished and running requests.
"""

from __future__ import annotations

from collections import Counter

from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import Spans
from rollout_sched.core.model.model import Attempt, Group, Request
from rollout_sched.core.model.records import Segment
from rollout_sched.core.state.fleet import Fleet
from rollout_sched.core.state.groups import SampleBuffer
from rollout_sched.core.state.lifecycle import ACTING, FINISHED
from rollout_sched.core.work.attempts import discard

#: A draft is cut at the length that only e^-3, one draft in twenty, would reach: to prefill more
#: would cost more than it saves. The rate is known once _KNOWN drafts were rejected. _FEWEST tokens
#: times versions are always tested, so that the scheduler notices when the policy drifts less.
_FAR = 3.0
_KNOWN = 16
_FEWEST = 16.0


class Verification:
    """Drafts, the kept part of each, and the resulting age of their groups.

    `on`: whether the policy verifies. Direct requests are never verified: they are not trained on,
    and their clients may not have asked for log-probabilities.

    Earlier drafts tell how far a draft gets: `tested` counts their kept tokens times the versions
    they were behind, `rejected` the drafts that were not kept whole.
    """

    def __init__(
        self,
        on: bool,
        fleet: Fleet,
        samples: SampleBuffer,
        anomalies: Counter[str],
        out: list[Action],
    ) -> None:
        self.on = on
        self.tested = self.rejected = 0
        self._fleet = fleet
        self._samples = samples
        self._anomalies = anomalies
        self._out = out

    def trim(self, request: Request, version: int) -> None:
        """Drop tokens that are unlikely to pass under this version, before they are prefilled."""
        if request.group is None or self.rejected < _KNOWN:
            return
        room = max(_FEWEST, _FAR * self.tested / self.rejected)
        kept = 0
        for segment in request.segments:
            behind = max(0, version - segment.version)
            if segment.tokens * behind > room:
                kept += int(room / behind)
                if kept >= request.settled_tokens:
                    self._cut(request, kept)
                return
            room -= segment.tokens * behind
            kept += segment.tokens

    def draft(self, request: Request, version: int) -> Spans:
        """The leading response tokens, by the versions they count as, up to the last one older than
        `version`; if the response is whole, all its tokens."""
        if request.group is None or not request.segments:
            return ()
        spans = [(segment.version, segment.tokens) for segment in request.segments]
        while spans and spans[-1][0] >= version and not request.ends:
            spans.pop()
        return tuple(spans)

    def passed(self, attempt: Attempt, tokens: int) -> None:
        """`tokens` leading tokens of the attempt's draft have passed; the rest is dropped, with all
        that follows it."""
        request, draft = attempt.request, attempt.draft_tokens
        kept = min(max(0, tokens), draft)
        if kept != tokens:
            self._anomalies["tokens_out_of_range"] += 1
        attempt.draft_tokens = 0
        if not request.settled_tokens:
            self._note(request, kept, attempt.version, rejected=kept < draft)
        context, response = request.context_tokens, request.response_tokens
        if kept < draft:
            self._cut(request, kept)
        self._relabel(request, draft, attempt)
        self._fleet.shrink(
            attempt, context - request.context_tokens, response - request.response_tokens
        )
        request.computed_tokens = request.context_tokens
        if request.group is not None:
            self.renew(request.group)

    def hold(self, request: Request, reason: str, room: int) -> bool:
        """Keep a finished response as a draft to be verified. A response that ended at a limit, or
        without `room` for another token, drops its last token, whatever it is, and goes on as any
        other. False if there is nothing to verify, or no token that can be dropped.

        If the model ended by itself, its last token must be tested like the others: if it were
        always sampled again, the end of a response would have to be sampled twice.
        """
        if reason == "stop" and room and request.response_tokens:
            request.ends = True
        elif request.response_tokens > request.settled_tokens:
            self._cut(request, request.response_tokens - 1)
        else:
            return False
        return True

    def renew(self, group: Group) -> None:
        """Update the age of the group, some of whose old tokens are gone or were verified."""
        if group not in self._samples:
            return
        if any(r.state is FINISHED and not r.segments for r in group.requests):
            return  # an answer without tokens keeps the age that is known of it
        ages = [age for age in map(_age, group.requests) if age is not None]
        self._samples.set_version(group, min(ages, default=None))

    def _note(self, request: Request, kept: int, version: int, *, rejected: bool) -> None:
        self.rejected += rejected
        for segment in _leading(request.segments, kept):
            self.tested += segment.tokens * max(0, version - segment.version)

    def _cut(self, request: Request, kept: int) -> None:
        """Keep `kept` response tokens. Tokens that a tool has answered are not cut: then all go."""
        if kept < request.settled_tokens:
            kept = 0
        rejected = request.response_tokens - kept
        self._out.append(discard(request, rejected, "rejected"))
        if kept or not request.settled_tokens:
            request.context_tokens -= rejected
        else:
            request.context_tokens = request.siblings.prompt_tokens
            request.turn = request.settled_tokens = 0
        request.response_tokens = kept
        request.ends = False
        request.computed_tokens = min(request.computed_tokens, request.context_tokens)
        request.segments = _leading(request.segments, kept)

    def _relabel(self, request: Request, draft: int, attempt: Attempt) -> None:
        """The kept part of the draft counts as made by the version that verified it."""
        tokens = min(draft, request.response_tokens)
        if tokens:
            made = request.segments[len(_leading(request.segments, tokens)) :]
            verified = Segment(attempt.version, tokens, attempt.instance.id, verified=True)
            request.segments = (verified, *made)


def _leading(segments: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    """The segments of the first `tokens` tokens."""
    kept: list[Segment] = []
    for segment in segments:
        if not tokens:
            break
        if segment.tokens > tokens:
            segment = Segment(segment.version, tokens, segment.instance, segment.verified)
        kept.append(segment)
        tokens -= segment.tokens
    return tuple(kept)


def _age(request: Request) -> int | None:
    """The oldest version of its tokens; None if all of them will be verified first."""
    if request.attempt is not None:
        return request.attempt.version
    if request.state is FINISHED or request.state is ACTING:
        return min([segment.version for segment in request.segments], default=None)
    return None
