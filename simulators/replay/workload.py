"""The workload of a run: a trace cut to the trainer's steps, the same prompts for every policy, and
the same clients.
"""

from __future__ import annotations

import random

from rollout_sched.core.errors import CallerError
from rollout_sched.simulators.replay.scenario import Job, Scenario
from rollout_sched.simulators.replay.traffic import Traffic, TrafficModel
from rollout_sched.simulators.traces.model import Sample, Trace
from rollout_sched.simulators.traces.synthetic import draw_extra


class Workload:
    """Prompts in training order, and what each of their samples will do.

    Seed 0 keeps the order of the trace, other seeds shuffle it (not where arrivals are recorded).
    Samples the trace does not hold are drawn from those of their own group; `drawn` counts them.
    `traffic`: the clients' conversations.
    """

    def __init__(
        self,
        trace: Trace,
        job: Job,
        *,
        steps: int = 0,
        seed: int = 0,
        traffic: TrafficModel | None = None,
    ) -> None:
        self.trace = trace
        self.seed = seed
        self.samples_per_prompt = job.samples_per_prompt or trace.group_size
        self.max_tokens = job.max_tokens or trace.cap
        self.prompts_per_step = job.prompts_per_step or min(64, max(1, len(trace.groups) // 4))
        prompts = list(trace.groups)
        if seed and not any(sample.arrival_s for sample in trace.samples()):
            random.Random(seed).shuffle(prompts)
        if not job.batches:
            prompts = []
        self.prompts = prompts[: steps * self.prompts_per_step] if steps else prompts
        self.traffic = None if traffic is None else Traffic(traffic, trace, seed)
        self._uncut = self.max_tokens >= trace.cap
        self._extra: dict[tuple[str, int], Sample] = {}
        self._prompt_tokens = {
            prompt: max(sample.prompt_tokens for sample in trace.groups[prompt])
            for prompt in self.prompts
        }

    @property
    def drawn(self) -> int:
        return len(self._extra)

    def sample(self, group: str, index: int) -> Sample:
        """What the sample will do, cut at `max_tokens`."""
        recorded = self.trace.groups[group]
        if index < len(recorded):
            sample = recorded[index]
            return sample if self._uncut else sample.cut_at(self.max_tokens)
        extra = self._extra.get((group, index))
        if extra is None:
            drawn = draw_extra(self.trace, group, index, self.seed)
            extra = self._extra[group, index] = drawn.cut_at(self.max_tokens)
        return extra

    def length(self, group: str, index: int) -> int:
        """Response tokens the sample will have made in the end."""
        if self.traffic is not None and group not in self.trace.groups:
            return self.traffic.length(group)
        return self.sample(group, index).response_tokens

    def prompt_tokens(self, group: str) -> int:
        return self._prompt_tokens[group]

    def arrival_s(self, group: str) -> float:
        return self.trace.groups[group][0].arrival_s

    def offered(self, group: str) -> list[int]:
        """Response tokens of the samples the trainer asked for, whatever a policy delivers."""
        return [sample.response_tokens for sample in self._offered(group)]

    def offered_samples(self) -> list[Sample]:
        """The samples behind `offered`, of every prompt."""
        return [sample for prompt in self.prompts for sample in self._offered(prompt)]

    def _offered(self, group: str) -> list[Sample]:
        recorded, count = self.trace.groups[group], self.samples_per_prompt
        if self._uncut and count <= len(recorded):
            return recorded[:count]
        return [self.sample(group, index) for index in range(count)]

    def check_fits(self, scenario: Scenario) -> None:
        """Raise CallerError, before any work, if something can never run on this fleet."""
        fleet = scenario.fleet
        largest = min(fleet.kv_tokens // fleet.block_size * fleet.block_size, fleet.max_model_len)
        for prompt in self.prompts:
            observed = max(s.final_context - s.response_tokens for s in self.trace.groups[prompt])
            needed = observed + self.max_tokens
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
                f"{self.traffic.most_tokens} tokens (what was said before, and a cap of "
                f"{self.traffic.max_tokens}), but an instance holds {largest}; set "
                f"traffic.max_tokens lower, or give it more fleet.kv_tokens or fleet.max_model_len"
            )
