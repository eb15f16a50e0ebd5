"""Finished requests as they are handed out: to the trainer, to a client, or to be judged."""

from __future__ import annotations

from msgspec.structs import replace

from rollout_sched.core.actions import Action, Judge
from rollout_sched.core.model import Group, Request
from rollout_sched.core.progress import RunProgress
from rollout_sched.core.roles import Roles
from rollout_sched.core.samples import DeliveredSample, Segment
from rollout_sched.core.serials import Serials


class FinishedSamples:
    """Builds samples when they go out, because their age depends on the trainer's version."""

    def __init__(
        self, roles: Roles, progress: RunProgress, serials: Serials, out: list[Action]
    ) -> None:
        self._freshness = roles.freshness
        self._masks = roles.masks
        self._progress = progress
        self._serials = serials
        self._out = out

    def of(self, request: Request) -> DeliveredSample:
        segments = request.segments
        if self._masks and request.group is not None:
            segments = self._masked(segments)
        newest = self._progress.version
        oldest: int | None = None
        verified = masked = 0
        for segment in segments:
            if segment.verified:
                verified += segment.tokens
            if segment.masked:
                masked += segment.tokens
            elif oldest is None or segment.version < oldest:
                oldest = segment.version
        return DeliveredSample(
            request.id,
            request.siblings.id,
            request.index,
            request.siblings.prompt_tokens,
            request.response_tokens,
            segments,
            0 if oldest is None else newest - oldest,
            request.finish,
            verified,
            masked,
        )

    def judge(self, group: Group) -> None:
        """Ask whether a whole group is to be trained."""
        group.judgement = self._serials.next()
        samples = tuple([self.of(request) for request in group.finished])
        self._out.append(Judge(group.id, group.judgement, samples))

    def _masked(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        oldest = self._freshness.oldest_allowed(self._progress.version)
        return tuple(
            [replace(one, masked=True) if one.version < oldest else one for one in segments]
        )
