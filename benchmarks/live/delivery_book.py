"""Check deliveries against requests: each group once and whole, with the requested lengths."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_sched.client import Batch, Prompt, Sample


class DeliveryBook:
    """`outstanding` are the groups not delivered yet; `failures` are other errors."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = {prompt.uid: prompt for prompt in prompts}
        self.outstanding = set(self._prompts)
        self._wrong: list[str] = []

    @property
    def failures(self) -> list[str]:
        return [*self._wrong, *(f"{uid}: never delivered" for uid in sorted(self.outstanding))]

    def enter(self, batch: Batch) -> None:
        self._wrong += [f"{one.uid}: {one.reason}" for one in batch.failed]
        for uid, samples in batch.groups().items():
            if uid not in self.outstanding:
                self._wrong.append(f"{uid}: delivered twice, or never requested")
                continue
            self.outstanding.remove(uid)
            self._check(self._prompts[uid], samples)

    def _check(self, prompt: Prompt, samples: Sequence[Sample]) -> None:
        distinct = len({sample.index for sample in samples})
        if distinct != prompt.samples or distinct != len(samples):
            self._wrong.append(f"{prompt.uid}: {distinct} samples, not {prompt.samples}")
        for sample in samples:
            wanted = prompt.sampling_of(sample.index)["extra_args"]["fake_response_tokens"]
            made = len(sample.response_ids)
            if made != wanted:
                self._wrong.append(f"{sample.uid}/{sample.index}: {made} tokens, not {wanted}")
