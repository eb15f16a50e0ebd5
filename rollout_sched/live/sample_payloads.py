"""Creates the payloads of a trainer's samples."""

from __future__ import annotations

from collections.abc import Callable

from rollout_sched.live.draft_test import DraftTest
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.samples import Prompt
from rollout_sched.live.trajectory import Tool, TrajectoryPayload


class SamplePayloads:
    """`stream_every`: tokens between partial results; `test`: the test of drafts, if old tokens are
    verified; `max_model_len`: tokens that every instance accepts, 0 if unknown."""

    def __init__(
        self, stream_every: int, test: DraftTest | None, max_model_len: Callable[[], int]
    ) -> None:
        self.stream_every = stream_every
        self._test = test
        self._max_model_len = max_model_len

    @property
    def verified(self) -> bool:
        """Whether their old tokens may be verified."""
        return self._test is not None

    def new(self, prompt: Prompt, index: int, tool: Tool | None = None) -> TokenPayload:
        """The payload of the sample with this index of a prompt."""
        sampling, stream_every = prompt.sampling_of(index), self.stream_every
        if tool is None:
            return TokenPayload(
                prompt.prompt_ids, sampling, stream_every=stream_every, test=self._test
            )
        return TrajectoryPayload(
            prompt.uid,
            index,
            prompt.prompt_ids,
            sampling,
            tool,
            self._max_model_len,
            stream_every=stream_every,
            extra=prompt.extra,
            test=self._test,
        )
