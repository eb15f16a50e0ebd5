"""All folds together: they turn a journal into steps and a summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import Event
from rollout_sched.metrics.attempts import AttemptIndex
from rollout_sched.metrics.bubbles import CAUSES, Bubbles, FleetShares, FleetTime
from rollout_sched.metrics.fold import Fold, by_type, mean, share
from rollout_sched.metrics.length_bias import LengthBias, LengthFold
from rollout_sched.metrics.results import Step, Summary
from rollout_sched.metrics.steps import Steps
from rollout_sched.metrics.waste import Waste


def summarize(
    folded: Steps, bubbles: Bubbles, waste: Waste, bias: LengthBias, total_s: float
) -> Summary:
    """The figures of the run; `total_s` is when its last step was trained, in seconds."""
    steps, current, staleness = folded.delivered, folded.current, folded.staleness
    tokens = sum(step.tokens for step in steps)
    generated = sum(step.generated_tokens for step in steps) + current.generated_tokens
    idle, vacant, capacity = _bubbles(folded, bubbles, total_s)
    first_step_s = steps[0].end_s if steps else 0.0
    return Summary(
        total_s=total_s,
        first_step_s=first_step_s,
        steady_s=folded.steady_s,
        drain_s=total_s - first_step_s - folded.steady_s if steps else 0.0,
        rollout_s=mean([step.rollout_s for step in steps]),
        t50_s=mean([step.t50_s for step in steps]),
        t90_s=mean([step.t90_s for step in steps]),
        t99_s=mean([step.t99_s for step in steps]),
        tokens_per_s=share(generated, total_s),
        accepted_tokens_per_s=share(tokens, total_s),
        equal_length_tokens_per_s=share(tokens, total_s) / max(1.0, bias.mean_ratio),
        fresh_tokens_per_s=share(sum(step.fresh_tokens for step in steps), total_s),
        steady_accepted_tokens_per_s=folded.steady_tokens_per_s(),
        idle_bubble=share(sum(idle.values()), capacity),
        idle_bubble_by_cause={cause: share(idle[cause], capacity) for cause in CAUSES},
        occupancy_bubble=share(sum(vacant.values()), capacity),
        occupancy_bubble_by_cause={cause: share(vacant[cause], capacity) for cause in CAUSES},
        preemptions=waste.preemptions,
        resumed_attempts=waste.resumed_attempts,
        reprefilled_tokens=waste.reprefilled_tokens,
        drafted_tokens=waste.drafted_tokens,
        draft_acceptance=waste.draft_acceptance,
        masked_tokens=sum(step.masked_tokens for step in steps),
        discarded_tokens=sum(step.discarded_tokens for step in steps) + current.discarded_tokens,
        discarded_tokens_by_cause=dict(sorted((+waste.discarded).items())),
        filtered_groups=waste.filtered_groups,
        trainer_wait_s=sum(step.trainer_wait_s for step in steps),
        staleness_mean=share(
            sum(age * count for age, count in staleness.items()), staleness.total()
        ),
        staleness_max=max(staleness, default=0),
        staleness_histogram=dict(sorted(staleness.items())),
        length_bias=bias,
        oldest_prompt_age_steps=folded.launches.oldest_age,
        samples_delivered=sum(step.samples for step in steps),
        steps=len(steps),
    )


def _bubbles(
    folded: Steps, bubbles: Bubbles, total_s: float
) -> tuple[dict[str, float], dict[str, float], float]:
    """Idle and vacant instance-seconds by cause, and all of them, until the end of training."""
    bubbles.time.settle()
    steps: list[Step | FleetTime] = [*folded.delivered, bubbles.time]
    idle = {cause: sum(step.idle_s.get(cause, 0.0) for step in steps) for cause in CAUSES}
    vacant = {cause: sum(step.vacant_s.get(cause, 0.0) for step in steps) for cause in CAUSES}
    capacity = sum(step.capacity_s for step in steps)
    rest = max(0.0, total_s - bubbles.now) * bubbles.instances
    idle["barrier"] += rest
    vacant["barrier"] += rest
    return idle, vacant, capacity + rest


class Metrics:
    """Folds (now, event, actions), in order, into steps and a summary.

    `reference_batch`: the places of an instance for the occupancy bubble, such as its even share of
    a batch. `offered(group)`: the response lengths the trainer asked for (length bias).
    `colocated`: training takes the instances' GPUs, so the fleet then counts as waiting at the
    barrier. `train_s_per_token`: how long the trainer is busy with a part of a batch; without it,
    the trainer counts as waiting until the last part. `beside`: folds of the caller, which see the
    same entries.
    """

    def __init__(
        self,
        reference_batch: float,
        offered: Callable[[str], Sequence[int]] | None = None,
        *,
        colocated: bool = False,
        train_s_per_token: float = 0.0,
        beside: Iterable[Fold] = (),
    ) -> None:
        self.attempts = AttemptIndex()
        fleet = FleetShares(self.attempts, reference_batch)
        self._bubbles = Bubbles(self.attempts, fleet, colocated)
        self._steps = Steps(self.attempts, self._bubbles, train_s_per_token)
        self._waste = Waste()
        self._lengths = LengthFold(offered)
        # In this order: the others use the index.
        folds = (self.attempts, fleet, self._bubbles, self._steps, self._waste, self._lengths)
        self._handlers = by_type(*folds, *beside)

    @property
    def reference_batch(self) -> float:
        return self._bubbles.reference_batch

    @property
    def steps(self) -> list[Step]:
        return self._steps.delivered

    @property
    def curves(self) -> list[list[float]]:
        """For each step: when its samples were finished (see `Steps`)."""
        return self._steps.curves

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take the next entry of the journal and the actions of the scheduler."""
        if now > self._bubbles.now:
            self._bubbles.pass_time(now)
        handlers = self._handlers
        for handle in handlers.get(type(event), ()):
            handle(now, event)
        for action in actions:
            for handle in handlers.get(type(action), ()):
                handle(now, action)

    def summary(self, total_s: float) -> Summary:
        """The figures of the run; `total_s` is when its last step was trained, in seconds."""
        bias = self._lengths.bias(self._steps.steady)
        return summarize(self._steps, self._bubbles, self._waste, bias, total_s)
