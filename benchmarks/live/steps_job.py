"""A job of several steps: prompts, lengths of samples, and the time of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from benchmarks.live.rollout_batch import Ask, asks, groups_of, ids_of
from rollout_sched.client import Prompt
from rollout_sched.config import load_policy
from rollout_sched.simulators.replay import Scenario, Workload
from rollout_sched.simulators.replay.runs import Run, run_policy
from rollout_sched.simulators.replay.scenario import Job, Visibility
from rollout_sched.simulators.traces.model import SampleRecord, Trace

#: Lengths sent per requested sample, because a policy may over-sample: at most this many times.
MOST_OVER = 2


@dataclass(frozen=True)
class StepsJob:
    """`trace` has only the prompts of this job, each with `samples` recorded samples.

    speed: simulated seconds per second; all times here are simulated.
    """

    trace: Trace
    scenario: Scenario
    prompts_per_step: int
    samples: int
    speed: float

    @property
    def workload(self) -> Workload:
        """The same lengths as in the replay, including over-sampled ones."""
        return Workload(self.trace, self.scenario.job)

    def training_s(self, tokens: int, *, last: bool = True) -> float:
        return self.scenario.trainer.step_s(tokens, last=last)

    def prompts(self, nonce: str) -> Iterator[Prompt]:
        """The prompts as our trainer submits them. Only the simulated instances get the lengths."""
        load = self.workload
        for group in load.groups:
            lengths = [load.length(group, index) for index in range(MOST_OVER * self.samples)]
            yield Prompt(
                group,
                ids_of(f"{nonce}/{group}", load.prompt_tokens(group)),
                samples=self.samples,
                max_tokens=load.max_tokens,
                sampling={"temperature": 1.0},
                each=[{"extra_args": {"fake_response_tokens": tokens}} for tokens in lengths],
            )

    def steps(self, nonce: str, model: str) -> Iterator[list[Ask]]:
        """The requests of each step, as a trainer in lock step sends them."""
        groups = list(self.trace.groups.values())
        for first in range(0, len(groups), self.prompts_per_step):
            step = groups[first : first + self.prompts_per_step]
            yield asks(step, model, self.workload.max_tokens, nonce)

    def replayed(self, policy: str) -> Run:
        """This job under a policy in the simulation in virtual time."""
        return run_policy(load_policy(policy), self.trace, self.scenario)


def job_of(
    trace: Trace,
    scenario: Scenario,
    number: int,
    *,
    steps: int,
    prompts_per_step: int,
    samples: int,
    speed: float,
) -> StepsJob:
    """The trace's next `steps * prompts_per_step` prompts for each `number`.

    Raises ValueError if the trace is too short or its groups are too small.
    """
    prompts = steps * prompts_per_step
    groups = groups_of(trace, number, prompts, samples)
    by_name = {members[0].group: list(members) for members in groups}
    if len(by_name) < prompts:
        raise ValueError(
            f"{trace.name} has {len(by_name)} groups of {samples} samples, {prompts} are needed; "
            f"ask for fewer steps or prompts"
        )
    # The driver polls gauges once per real second.
    seen = Visibility(poll_s=speed)
    job = Job(prompts_per_step=prompts_per_step, samples_per_prompt=samples, max_tokens=trace.cap)
    return StepsJob(
        msgspec.structs.replace(trace, groups=by_name),
        msgspec.structs.replace(scenario, job=job, visibility=seen),
        prompts_per_step,
        samples,
        speed,
    )


def tokens_of(samples: Iterable[SampleRecord]) -> int:
    """The tokens that training on these samples must read."""
    return sum(sample.prompt_tokens + sample.response_tokens for sample in samples)
