"""What was promised in a run and what came of it; a law that is broken is said at once."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.live.samples import Batch, Prompt, Sample
from rollout_sched.simulators.fake_instance import synthetic_tokens as text
from rollout_sched.simulators.fake_instance.weights import FIRST


class LawBroken(AssertionError):
    """What must never be has come about; the text says what."""


def hold(law: str, holds: object, found: object = "") -> None:
    """Raises LawBroken."""
    if not holds:
        raise LawBroken(f"{law}: {found}")


class Ledger:
    """Of one run, over all lives of its gateway and its trainer.

    `bound`: of staleness; `in_place`: weights are changed under requests that run; `restarts`:
    instances are; `may_lose`: a loss of power may take what was promised.

    accepted      groups whose submission was answered
    acknowledged  batches that the trainer has asked for what follows, and was answered
    trained       groups, each once
    failed        groups, and why
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        bound: int | None,
        drift: float,
        *,
        in_place: bool = False,
        restarts: bool = False,
        may_lose: bool = False,
    ) -> None:
        self.prompts = {prompt.uid: prompt for prompt in prompts}
        self.accepted: set[str] = set()
        self.acknowledged: dict[str, int] = {}
        self.trained: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.published = [0]
        self._bound = bound
        self._drift = drift
        self._in_place = in_place
        self._restarts = restarts
        self._may_lose = may_lose

    def delivered(self, batch: Batch) -> None:
        """A batch, or a part of one, has reached the trainer."""
        for sample in batch.samples:
            hold(
                "what is acknowledged never comes again",
                sample.uid not in self.acknowledged,
                sample,
            )
            self._check_sample(sample, batch.version)
        for uid, samples in batch.groups().items():
            hold("a group comes from what was submitted", uid in self.prompts, uid)
            indices = [sample.index for sample in samples]
            hold("a group comes whole", len(set(indices)) == self.prompts[uid].samples, indices)
            hold("a sample comes once", len(indices) == len(set(indices)), indices)

    def _check_sample(self, sample: Sample, version: int) -> None:
        prompt = self.prompts[sample.uid]
        hold("a prompt comes back as it was", sample.prompt_ids == prompt.prompt_ids, sample.uid)
        trained = [v for v, mask in zip(sample.versions, sample.response_mask, strict=True) if mask]
        if self._bound is not None and trained:
            old = version - min(trained)
            hold("nothing trained is too old", max(old, sample.staleness) <= self._bound, sample)
        made = len(sample.response_ids)
        hold("a response keeps to its limit", 0 < made <= prompt.max_tokens, sample)
        hold("what was published made it", max(sample.versions) <= max(self.published), sample)
        self._check_tokens(sample, prompt.prompt_ids, version)
        name = text.name(text.read(prompt.prompt_ids))
        logprobs = text.logprobs(name, 0, made)
        hold("log-probabilities are the tokens'", sample.rollout_log_probs == logprobs, sample)

    def _check_tokens(self, sample: Sample, prompt: list[int], version: int) -> None:
        """Each is what the version says that it is labelled with.

        With two exceptions for what a stream brought that broke off, which is without labels. Where
        weights are changed under requests it may be what a newer version says. And it may be what
        the weights of a start say, if the gateway stopped before it noticed that the instance had
        been restarted.
        """
        ids, labels = sample.response_ids, sample.versions
        true = said(prompt, labels, self._drift)
        others = range(min(labels) + 1, version + 1) if self._in_place else range(0)
        for other in [FIRST, *others] if self._restarts else others:
            by = [other if other == FIRST else max(other, label) for label in labels]
            may_be = said(prompt, by, self._drift)
            last = sample.segments[-1].start if other == FIRST else len(ids)
            true = [
                a if a == made or place >= last else b
                for place, (a, b, made) in enumerate(zip(true, may_be, ids, strict=True))
            ]
        hold("tokens are what their versions say", ids == true, (sample, true))

    def train(self, batch: Batch) -> None:
        """The trainer has trained a whole batch, and its checkpoint says so."""
        for uid in batch.groups():
            hold("a group is trained once", uid not in self.trained, uid)
            self.trained[uid] = batch.number
        for group in batch.failed:
            self.failed[group.uid] = group.reason

    def acknowledge(self, number: int) -> None:
        """All up to this batch is the trainer's for certain."""
        for uid, batch in self.trained.items():
            if batch <= number:
                self.acknowledged.setdefault(uid, batch)

    def forgotten(self, uids: Iterable[str]) -> None:
        lost = self.accepted.intersection(uids)
        hold("what was accepted is not forgotten", self._may_lose or not lost, sorted(lost))
        self.accepted -= lost

    def check_end(self) -> None:
        """All that was submitted has come, or was said to have failed."""
        missing = self.prompts.keys() - self.trained.keys() - self.failed.keys()
        hold("every sample is accounted for", not missing, sorted(missing))


def said(prompt: list[int], versions: list[int], drift: float) -> list[int]:
    """The greedy response to a prompt whose tokens these versions made."""
    name = text.name(text.read(prompt))
    spans: list[tuple[int, int]] = []
    for version in versions:
        version = version if drift else 0
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + 1)
        else:
            spans.append((version, 1))
    return text.tokens(name, 0, spans, drift or 1.0)
