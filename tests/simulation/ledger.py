"""Records what was promised in a run and what happened; raises as soon as a law is broken."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from rollout_sched.live.trainer.samples import OBSERVED, Batch, Prompt, Sample
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.engine import FIRST
from tests.simulation import models, rewards, tools


class LawBroken(AssertionError):
    """A law is broken; the text names it."""


def hold(law: str, holds: object, found: object = "") -> None:
    """Raises LawBroken."""
    if not holds:
        raise LawBroken(f"{law}: {found}")


class Receipt(NamedTuple):
    """When a trainer asked for a batch and when it received it; it was handed out in between."""

    asked_s: float
    received_s: float

    def may_be_after(self, other: Receipt, lease_s: float) -> bool:
        return bool(lease_s) and self.received_s >= other.asked_s + lease_s


class Ledger:
    """The ledger of one run, over all restarts of its gateway and its trainers.

    `bound`: of staleness; `in_place`: weights change under running requests; `restarts`: instances
    restart; `lease_s`: lease of a batch, 0: forever; `keeps_all`: no group is filtered; `may_fail`:
    there are faults for which a group may fail or a lease may end.

    accepted      groups whose submission was answered
    acknowledged  groups whose trainer asked for the next batch and got an answer, by batch
    claimed       by trainer: a batch that is in its checkpoint but not acknowledged
    failed        failed groups with their reasons
    filtered      filtered groups
    again         groups that were submitted again, with the batch that reported their failure
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        bound: int | None,
        versioned: bool,
        *,
        in_place: bool = False,
        restarts: bool = False,
        lease_s: float = 0.0,
        keeps_all: bool = True,
        may_fail: bool = False,
    ) -> None:
        self.prompts = {prompt.uid: prompt for prompt in prompts}
        self.accepted: set[str] = set()
        self.acknowledged: dict[str, int] = {}
        self.claimed: dict[str, Batch] = {}
        self.failed: dict[str, str] = {}
        self.filtered: set[str] = set()
        self.again: dict[str, int] = {}
        self.published = [0]
        self._received: dict[int, dict[str, Receipt]] = {}  # by batch and trainer
        self._whose: dict[int, str] = {}  # acknowledged batch -> trainer
        self._bound = bound
        self._versioned = versioned
        self._in_place = in_place
        self._restarts = restarts
        self._lease_s = lease_s
        self._keeps_all = keeps_all
        self._may_fail = may_fail

    @property
    def is_all_accepted(self) -> bool:
        return self.accepted >= self.prompts.keys()

    @property
    def held(self) -> list[int]:
        """Batches that a trainer has."""
        return list(self._received.keys() - self._whose.keys())

    @property
    def over(self) -> set[str]:
        """Groups that a trainer has trained, or knows to be lost, and that were not submitted again
        since."""
        claimed = {uid: batch.number for batch in self.claimed.values() for uid in _groups(batch)}
        known = claimed.keys() | self.acknowledged.keys() | self.failed.keys() | self.filtered
        return known - {uid for uid, told in self.again.items() if claimed.get(uid, told) == told}

    def delivered(self, batch: Batch, trainer: str, receipt: Receipt) -> None:
        """A batch, or a part of one, has reached a trainer."""
        received = self._received.setdefault(batch.number, {})
        received[trainer] = receipt
        for other in [one for name, one in received.items() if name != trainer]:
            one_after_the_other = receipt.may_be_after(other, self._lease_s) or other.may_be_after(
                receipt, self._lease_s
            )
            hold("no trainer takes a batch that another holds", one_after_the_other, batch.number)
        # An answer that was sent before another trainer took the batch may arrive late.
        over = self._whose.get(batch.number, trainer) == trainer
        for sample in batch.samples:
            again = over and sample.uid in self.acknowledged
            hold("an acknowledged batch is never delivered again", not again, sample)
            self._check_sample(sample, batch.version)
        for uid, samples in batch.groups().items():
            hold("a delivered group was submitted", uid in self.prompts, uid)
            indices = [sample.index for sample in samples]
            hold(
                "a group is delivered complete",
                len(set(indices)) == self.prompts[uid].samples,
                indices,
            )
            hold("a sample is delivered once", len(indices) == len(set(indices)), indices)
            self._check_kept(uid, samples)

    def _check_kept(self, uid: str, samples: list[Sample]) -> None:
        extra = self.prompts[uid].extra
        worth = [rewards.total(extra, sample.index) for sample in samples if "worth" in extra]
        told = [sample.reward for sample in samples if "worth" in extra]
        hold("a sample has its own reward", None not in told and told == worth, (uid, told, worth))
        read = all(
            sample.rewards == rewards.worth(sample)
            for sample in samples
            if "worth" in extra and isinstance(rewards.worth(sample), dict)
        )
        hold("a reward belongs to the delivered response", read, samples)
        kept = self._keeps_all or len(set(worth)) != 1 or len(worth) == 1
        hold("only kept groups are trained", kept, (uid, worth))

    def _check_sample(self, sample: Sample, version: int) -> None:
        prompt = self.prompts[sample.uid]
        hold("a prompt is delivered unchanged", sample.prompt_ids == prompt.prompt_ids, sample.uid)
        trained = [v for v, mask in zip(sample.versions, sample.response_mask, strict=True) if mask]
        if self._bound is not None and trained:
            old = version - min(trained)
            hold("no trained sample is too old", max(old, sample.staleness) <= self._bound, sample)
        made = sum(version != OBSERVED for version in sample.versions)
        hold("a response respects its limit", 0 < made <= prompt.max_tokens, sample)
        hold(
            "only published versions generate tokens",
            max(sample.versions) <= max(self.published),
            sample,
        )
        self._check_tokens(sample, version)
        self._check_turns(sample)

    def _check_turns(self, sample: Sample) -> None:
        """Check that each turn has its log-probs, with the tool's output between the turns."""
        given, ids = sample.rollout_log_probs, sample.response_ids
        assert given is not None
        turn = 0
        for start, end, generated in turns(sample.versions):
            if generated:
                turn += 1
                logprobs = text.logprobs(ids[start], 0, end - start)
            else:
                observed = tools.observation(sample.uid, turn)
                hold("the output of a tool is kept", ids[start:end] == observed, sample)
                logprobs = [0.0] * (end - start)
            hold("log-probs belong to the tokens", given[start:end] == logprobs, sample)
        most = sample.extra.get("turns", 1)
        hold("a trajectory has at most its number of turns", turn <= most, sample)
        cut = sample.finish_reason == "length"
        hold("a trajectory runs to its end", turn == most or cut, sample)

    def _check_tokens(self, sample: Sample, version: int) -> None:
        """Check that each token is the one that its version generates, all of one model.

        There are two exceptions, both for tokens of a broken stream, which has no labels. If
        weights change under running requests, a token may be one of a newer version. And it may be
        one of the instance's first weights, if the gateway stopped before it noticed that the
        instance had restarted.
        """
        ids = sample.response_ids
        every = [self._said_by_version(sample, version, words) for words in models.WORDS.values()]
        hold("each token is the one that its version generates", ids in every, (sample, every[0]))

    def _said_by_version(self, sample: Sample, version: int, words: text.Vocabulary) -> list[int]:
        """The true response of a model, or an exception to it if that is what the sample has."""
        ids, labels = sample.response_ids, sample.versions
        oldest = min(label for label in labels if label != OBSERVED)
        true = said(sample, labels, self._versioned, words)
        others = range(oldest + 1, version + 1) if self._in_place else range(0)
        for other in [FIRST, *others] if self._restarts else others:
            by = [other if other == FIRST else max(other, label) for label in labels]
            may_be = said(sample, by, self._versioned, words)
            last = sample.segments[-1].start if other == FIRST else len(ids)
            true = [
                a if a == made or place >= last else b
                for place, (a, b, made) in enumerate(zip(true, may_be, ids, strict=True))
            ]
        return true

    def train(self, batch: Batch, trainer: str) -> None:
        """A trainer has trained a whole batch, and its checkpoint records it. It may still learn
        that the batch now belongs to another trainer, which trains it, too."""
        others = [b for t, b in self.claimed.items() if t != trainer and b.number != batch.number]
        for uid in batch.groups():
            claimed = any(uid in other.groups() for other in others)
            elsewhere = self.acknowledged.get(uid, batch.number) != batch.number
            hold("a group is trained once", not (claimed or elsewhere), uid)
        self.claimed[trainer] = batch

    def acknowledge(self, number: int, trainer: str) -> None:
        """The whole batch now belongs to the trainer permanently."""
        batch = self.claimed.pop(trainer, None)
        if batch is None:
            return  # acknowledged before
        assert batch.number == number
        hold(
            "only a trainer that has a batch acknowledges it",
            trainer in self._received[number],
            number,
        )
        hold("a batch is acknowledged once", number not in self._whose, number)
        self._whose[number] = trainer
        for uid in batch.groups():
            hold("a group is acknowledged once", uid not in self.acknowledged, uid)
            self.acknowledged[uid] = number
        for group in batch.failed:
            self._check_failed(group.uid, group.reason)
            self.failed[group.uid] = group.reason
        for uid in batch.filtered:
            self._check_filtered(uid)
            self.filtered.add(uid)
        for uid in _groups(batch):
            if self.again.get(uid, number) != number:
                del self.again[uid]

    def may_be_again(self, batch: Batch) -> list[Prompt]:
        """The prompts of its failed groups that no trainer has trained, which a damaged store may
        have forgotten, and that no later part of it reports as filtered."""
        claimed = {uid for other in self.claimed.values() for uid in other.groups()}
        ended = claimed | self.acknowledged.keys() | batch.groups().keys() | set(batch.filtered)
        return [self.prompts[g.uid] for g in batch.failed if g.uid not in ended]

    def submitted_again(self, uid: str, batch: int) -> None:
        """A failed group was submitted again, before or after the acknowledgement of the batch that
        reported it; it must end once more."""
        self.again.setdefault(uid, batch)

    def lease_ended(self, trainer: str) -> None:
        """A trainer was told that its batch now belongs to another trainer: it discards its
        result."""
        hold("an active trainer keeps its batch", self._may_fail and self._lease_s, trainer)
        self.claimed.pop(trainer, None)

    def _check_failed(self, uid: str, reason: str) -> None:
        extra = self.prompts[uid].extra
        unworthy = "worth" in extra and rewards.total(extra, 0) is None
        broken = unworthy or extra.get("raises_at", 0)
        hold("a group fails for a reason", self._may_fail or broken, (uid, reason))

    def _check_filtered(self, uid: str) -> None:
        prompt = self.prompts[uid]
        worth = {rewards.total(prompt.extra, index) for index in range(prompt.samples)}
        equal = prompt.samples > 1 and len(worth) == 1
        hold("only groups that the filter rejects are filtered", equal and not self._keeps_all, uid)

    def forgotten(self, uids: Iterable[str]) -> None:
        lost = self.accepted.intersection(uids)
        hold("an accepted group is not forgotten", not lost, sorted(lost))
        self.accepted -= lost

    def check_end(self) -> None:
        """Check that every submitted group was delivered or reported as lost, and acknowledged."""
        missing = self.prompts.keys() - self.over
        hold("every sample is accounted for", not missing, sorted(missing))
        hold("each trained batch is acknowledged", not self.claimed, list(self.claimed))


def _groups(batch: Batch) -> set[str]:
    """All groups that the batch contains or reports."""
    return {*batch.groups(), *batch.filtered, *(group.uid for group in batch.failed)}


def turns(versions: list[int]) -> Iterable[tuple[int, int, bool]]:
    """(start, end, whether it was generated) of each part of a response: a turn, or the output of
    a tool after it."""
    start = 0
    for generated, each in groupby(versions, lambda version: version != OBSERVED):
        end = start + len(list(each))
        yield start, end, generated
        start = end


def said(sample: Sample, versions: list[int], versioned: bool, words: text.Vocabulary) -> list[int]:
    """The greedy response of a model to the sample's prompt, with each token made by its
    version."""
    ids: list[int] = []
    for start, end, generated in turns(sample.versions):
        made = sample.response_ids[start:end]
        if generated:
            name = text.name(text.read([*sample.prompt_ids, *sample.response_ids[:start]]))
            by = versions[start:end] if versioned else [0] * len(made)
            spans = [(version, len(list(each))) for version, each in groupby(by)]
            made = text.tokens(name, 0, spans, words)
        ids += made
    return ids
