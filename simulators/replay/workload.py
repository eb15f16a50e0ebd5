"""The workload of a run: the trace cut to the trainer's steps and epochs, and the clients' traffic.
Every policy gets the same prompts and the same clients.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import GroupSubmitted
from rollout_sched.simulators.replay.scenario import Job, Scenario, Traffic, TrafficModel
from rollout_sched.simulators.traces.lengths import LengthModel, guessed_share
from rollout_sched.simulators.traces.model import VERDICT, SampleRecord, Trace


class Workload:
    """Groups in training order, and the recorded sample that each of their samples replays.

    Every prompt of the trace is a group in each epoch. In the first epoch the group has the
    prompt's name; seed 0 keeps the order of the trace, and other seeds shuffle it (not if arrivals
    are recorded). Later epochs are shuffled again. Each epoch trains recorded samples of its own,
    so what a policy learns about a prompt in one epoch predicts the next epoch no better than in a
    real run. If the trace has too few samples, the missing ones are drawn from `lengths`, and
    `drawn` counts them. With `job.redraws`, so is a sample that starts over. Samples that were cut
    when they were recorded are completed from `lengths`. No epoch trains the last
    `job.known_samples` recorded samples of a prompt; the trainer sends their lengths with each of
    its groups. With `job.growth`, responses grow from step to step. `lengths`: fitted from this
    trace (the default), or from the one that it was resampled from. `traffic`: the clients'
    conversations.
    """

    def __init__(
        self,
        trace: Trace,
        job: Job,
        *,
        steps: int = 0,
        seed: int = 0,
        lengths: LengthModel | None = None,
        traffic: TrafficModel | None = None,
    ) -> None:
        self._lengths = LengthModel(trace) if lengths is None else lengths
        self._ever_recorded = trace.groups
        completed = self._lengths.completed(trace, seed)
        #: Of the trace's response tokens, the share by which cut samples were completed.
        self.guessed_share = guessed_share(trace, completed)
        trace, self._known = _told_before(completed, job.known_samples)
        self.trace = trace
        self.seed = seed
        self.epochs = job.epochs
        self.samples_per_prompt = job.samples_per_prompt or _samples_per_prompt(trace, job.epochs)
        self.max_tokens = job.max_tokens or trace.cap
        self.prompts_per_step = (
            job.prompts_per_step
            or trace.prompts_per_step
            or min(64, max(1, len(trace.groups) // 4))
        )
        groups = _groups(trace, job.epochs, seed) if job.batches else []
        groups = groups[: steps * self.prompts_per_step] if steps else groups
        self.groups = [group for group, _, _ in groups]
        self.traffic = None if traffic is None else Traffic(traffic, trace, seed)
        self._growth = _growth(self.groups, self.prompts_per_step, job.growth)
        self._as_recorded = self.max_tokens >= trace.cap and not self._growth
        self._extra: dict[tuple[str, int], SampleRecord] = {}
        self._redraws = job.redraws
        self._begun: Counter[tuple[str, int]] = Counter()
        self._redrawn: dict[tuple[str, int], SampleRecord] = {}
        self._prompts = {group: prompt for group, prompt, epoch in groups if epoch}
        self._recorded = trace.groups
        if job.epochs > 1:
            self._recorded = {
                group: self._own(group, prompt, epoch) for group, prompt, epoch in groups
            }
        self._prompt_tokens = {
            group: max(sample.prompt_tokens for sample in trace.groups[prompt])
            for group, prompt, _ in groups
        }

    def _own(self, group: str, prompt: str, epoch: int) -> list[SampleRecord]:
        """The recorded samples of a prompt that only this epoch trains."""
        recorded = self.trace.groups[prompt]
        share = max(self.samples_per_prompt, len(recorded) // self.epochs)
        own = recorded[epoch * share : (epoch + 1) * share]
        if not epoch:
            return own
        return [
            msgspec.structs.replace(sample, group=group, sample=index)
            for index, sample in enumerate(own)
        ]

    @property
    def prompts(self) -> list[str]:
        """The prompts of the groups, each once."""
        return list(dict.fromkeys(map(self.prompt, self.groups)))

    @property
    def drawn(self) -> int:
        return len(self._extra)

    def prompt(self, group: str) -> str:
        """The prompt of a group: the name of a group of the trace."""
        return self._prompts.get(group, group)

    def submission(self, group: str, *, judged: bool = False) -> GroupSubmitted:
        """The event by which the trainer submits the group."""
        return GroupSubmitted(
            group,
            self.samples_per_prompt,
            self._prompt_tokens[group],
            self.max_tokens,
            self.prompt(group),
            self._known.get(self.prompt(group), ()),
            judged=judged,
        )

    def begin(self, group: str, index: int) -> SampleRecord:
        """What the sample replays when it starts without any tokens, the first time or again."""
        if self._redraws:
            times = self._begun[group, index]
            self._begun[group, index] += 1
            if times:
                self._redrawn[group, index] = self._draw(group, index, times)
        return self.sample(group, index)

    def _draw(self, group: str, index: int, times: int = 0) -> SampleRecord:
        """Another sample of the group's prompt, for the number of times that it has started."""
        members = self._ever_recorded[self.prompt(group)]
        drawn = self._lengths.draw(members, group, index, self.seed, times)
        return self._sized(drawn)

    def sample(self, group: str, index: int) -> SampleRecord:
        """What the sample replays, cut at `max_tokens`."""
        if self._redrawn:
            redrawn = self._redrawn.get((group, index))
            if redrawn is not None:
                return redrawn
        return self._first(group, index)

    def _first(self, group: str, index: int) -> SampleRecord:
        """What the sample replays if it starts only once."""
        recorded = self._recorded[group]
        if index < len(recorded):
            sample = recorded[index]
            return sample if self._as_recorded else self._sized(sample)
        extra = self._extra.get((group, index))
        if extra is None:
            extra = self._extra[group, index] = self._draw(group, index)
        return extra

    def _sized(self, sample: SampleRecord) -> SampleRecord:
        """The sample with the growth of its group's step, under the cap."""
        factor, cap = self._growth.get(sample.group, 1.0), self.max_tokens
        if factor != 1:
            turns = [
                msgspec.structs.replace(
                    turn, output_tokens=min(cap, max(1, round(turn.output_tokens * factor)))
                )
                for turn in sample.turns
            ]
            sample = msgspec.structs.replace(sample, turns=tuple(turns))
        return sample.cut_at(cap)

    def length(self, group: str, index: int) -> int:
        """The final number of response tokens of the sample."""
        if self.traffic is not None and group not in self._recorded:
            return self.traffic.length(group)
        return self.sample(group, index).response_tokens

    @property
    def judged(self) -> bool:
        """Whether groups were judged when they were recorded."""
        return any(self.verdict(group) is not None for group in self.groups)

    def verdict(self, group: str) -> str | None:
        """The recorded verdict on the group, "kept" or "filtered"."""
        prompt = self.trace.groups.get(self.prompt(group))
        return None if prompt is None else prompt[0].labels.get(VERDICT)

    def prompt_tokens(self, group: str) -> int:
        return self._prompt_tokens[group]

    def arrival_s(self, group: str) -> float:
        return self.trace.groups[self.prompt(group)][0].arrival_s

    def offered(self, group: str) -> list[int]:
        """Response tokens of the samples that the trainer requested, whatever a policy delivers."""
        return [sample.response_tokens for sample in self._offered(group)]

    def offered_samples(self) -> list[SampleRecord]:
        """The samples behind `offered`, of every group."""
        return [sample for group in self.groups for sample in self._offered(group)]

    def _offered(self, group: str) -> list[SampleRecord]:
        recorded, count = self._recorded[group], self.samples_per_prompt
        if self._as_recorded and count <= len(recorded):
            return recorded[:count]
        return [self._first(group, index) for index in range(count)]

    def check_fits(self, scenario: Scenario) -> None:
        """Raise CallerError, before any work, if a request can never fit on this fleet."""
        spec = scenario.instance
        largest = min(spec.kv_tokens, spec.max_model_len)
        for prompt in self.prompts:
            given = max([sample.given_tokens for sample in self.trace.groups[prompt]])
            needed = given + self.max_tokens
            if needed > largest:
                raise CallerError(
                    f"trace {self.trace.name}: group {prompt!r} may need {needed} tokens (prompt, "
                    f"observations and a cap of {self.max_tokens}), but an instance of scenario "
                    f"{scenario.name} holds {largest}; set job.max_tokens lower, or give the "
                    f"scenario more fleet.kv_tokens or fleet.max_model_len"
                )
        if self.traffic is not None and self.traffic.most_tokens > largest:
            raise CallerError(
                f"scenario {scenario.name}: a request of its traffic may need "
                f"{self.traffic.most_tokens} tokens (the conversation so far and a cap of "
                f"{self.traffic.max_tokens}), but an instance holds {largest}; set "
                f"traffic.max_tokens lower, or increase fleet.kv_tokens or fleet.max_model_len"
            )


def _told_before(trace: Trace, known: int) -> tuple[Trace, dict[str, tuple[int, ...]]]:
    """The trace without the last `known` samples of each prompt, and the lengths of those.

    Raises CallerError if no sample is left to train.
    """
    if not known:
        return trace, {}
    if known >= trace.group_size:
        raise CallerError(
            f"trace {trace.name} has {trace.group_size} samples per prompt; with {known} known "
            f"before the run, none is left to train; set known_samples to at most "
            f"{trace.group_size - 1}"
        )
    groups = trace.groups.items()
    trained = {prompt: samples[: max(1, len(samples) - known)] for prompt, samples in groups}
    rest = {
        prompt: tuple([sample.response_tokens for sample in samples[len(trained[prompt]) :]])
        for prompt, samples in groups
    }
    declared = trace.samples_per_prompt
    if declared is not None:
        declared = min(declared, max(map(len, trained.values())))
    replace = msgspec.structs.replace
    trace = replace(
        trace, groups=trained, max_response_tokens=trace.cap, samples_per_prompt=declared
    )
    return trace, rest


def _samples_per_prompt(trace: Trace, epochs: int) -> int:
    """The recorded samples divided among the epochs. Raises CallerError if that is no group."""
    share = trace.group_size // epochs
    if epochs > 1 and share < 2:
        raise CallerError(
            f"trace {trace.name}: {epochs} epochs of other samples each need {2 * epochs} samples "
            f"of a prompt, but it has {trace.group_size}; set epochs to at most "
            f"{max(1, trace.group_size // 2)}, or set samples_per_prompt: missing samples are then "
            f"drawn"
        )
    return share


def _groups(trace: Trace, epochs: int, seed: int) -> list[tuple[str, str, int]]:
    """Group, prompt and epoch (from 0) in training order. Group names are unique."""
    arrivals = any(sample.arrival_s for sample in trace.samples())
    if arrivals and epochs > 1:
        raise CallerError(
            f"trace {trace.name} has the arrival times of one epoch; leave epochs at 1, or convert "
            f"the trace without arrival_s"
        )
    groups = []
    for epoch in range(epochs):
        order = list(trace.groups)
        if epoch:
            random.Random(f"epoch/{seed}/{epoch}").shuffle(order)
        elif seed and not arrivals:
            random.Random(seed).shuffle(order)
        mark = _mark(order, epoch)
        groups += [(prompt + mark, prompt, epoch) for prompt in order]
    return groups


def _growth(groups: Sequence[str], prompts_per_step: int, growth: float) -> dict[str, float]:
    """By group, the length of its responses relative to those recorded; empty if none grows."""
    last = (len(groups) - 1) // prompts_per_step
    if growth == 1 or last < 1:
        return {}
    return {
        group: growth ** (number // prompts_per_step / last) for number, group in enumerate(groups)
    }


def _mark(prompts: Sequence[str], epoch: int) -> str:
    """The suffix of a prompt's name in this epoch: "@2" in the second one."""
    if not epoch:
        return ""
    at = "@"
    while any(at in prompt for prompt in prompts):
        at += "@"
    return f"{at}{epoch + 1}"
