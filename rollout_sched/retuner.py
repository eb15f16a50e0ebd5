"""Retunes a live scheduler: every N steps, a side process replays the recent past, and parameters
that would have been better are adopted after the next batch has gone to the trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from rollout_sched.config import PolicyFile, load_policy
from rollout_sched.core.model.actions import Action, Deliver
from rollout_sched.core.model.errors import CallerError
from rollout_sched.core.model.events import Event, Retuned
from rollout_sched.flags import positive, share
from rollout_sched.inspection import TraceFold
from rollout_sched.integrations.gateway.serve import Attach
from rollout_sched.live import LiveScheduler, RunOptions
from rollout_sched.metrics.fold import Folded
from rollout_sched.simulators.replay import Scenario, load_scenario
from rollout_sched.simulators.replay.runs import staleness_bound
from rollout_sched.simulators.traces import TraceError
from rollout_sched.simulators.tune import Better, HardLimits, Question, WorkerPool, better

log = logging.getLogger(__name__)

#: Least number of steps in the recent past: with fewer, the replay is mostly its beginning and end.
LEAST_STEPS = 4

#: The staleness limit if the policy has none, so that it is never exceeded.
NO_BOUND = 10**9

#: Answers a question outside of the event loop; `stopped()` tells that the answer is not needed.
Ask = Callable[[Question, Callable[[], bool]], Better | None]


class RetunePlan(msgspec.Struct, frozen=True):
    """steps     between two looks at the past, which has as many steps
    scenario  the fleet, as for a replay
    limits    limits not to exceed, in addition to the staleness bound of the policy file
    """

    steps: int
    scenario: Scenario
    limits: HardLimits

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            raise CallerError(f"--retune steps={self.steps}: at least {LEAST_STEPS} are needed")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve` for retuning."""
    group = parser.add_argument_group("retuning", "by replays of the recent past; see docs/tune.md")
    add = group.add_argument
    add("--retune", type=_steps, metavar="steps=N", help="replay the last N steps every N steps")
    add("--retune-scenario", metavar="NAME_OR_TOML", help="the fleet, as for `replay`")
    add(
        "--retune-length-bias",
        type=share,
        default=0.01,
        metavar="B",
        help="largest bias over a run, as --max-length-bias of `tune` (default: 0.01)",
    )
    add(
        "--retune-step-bias",
        type=share,
        default=0.1,
        metavar="C",
        help="largest bias of a step, as --max-step-bias of `tune` (default: 0.1)",
    )


def attachment(options: argparse.Namespace) -> Attach | None:
    """What `serve` must attach; None if retuning was not asked for. Raises CallerError."""
    if getattr(options, "retune", None) is None:
        return None
    if getattr(options, "retune_scenario", None) is None:
        raise CallerError("--retune needs --retune-scenario: the fleet to replay")
    policy = load_policy(options.policy)
    bound = staleness_bound(policy.build().freshness)
    limits = HardLimits(
        NO_BOUND if bound is None else bound, options.retune_length_bias, options.retune_step_bias
    )
    plan = RetunePlan(options.retune, load_scenario(options.retune_scenario), limits)
    size = getattr(options, "prompts_per_step", RunOptions().prompts_per_step)

    def attach(live: LiveScheduler) -> Callable[[], Awaitable[None]]:
        return Retuner(live, policy, size, plan).close

    return attach


def _steps(text: str) -> int:
    name, _, number = text.partition("=")
    if name != "steps":
        raise argparse.ArgumentTypeError(f"{text!r}: expected steps=N")
    return positive(number)


def ask_a_process(question: Question, stopped: Callable[[], bool]) -> Better | None:
    """Answer in a process of its own, which ends with the answer or when `stopped`."""
    with WorkerPool(better, jobs=1) as workers:
        answers = workers.answers([question], lambda: 0.0 if stopped() else 60.0)
        return next(answers, None)


class Retuner:
    """An observer of a live scheduler. Create it inside a running event loop.

    adopted  the adopted changes, in order
    """

    def __init__(
        self,
        live: LiveScheduler,
        policy: PolicyFile,
        prompts_per_step: int,
        plan: RetunePlan,
        ask: Ask = ask_a_process,
    ) -> None:
        self.adopted: list[Better] = []
        self._driver = live.driver
        self._policy = policy
        self._prompts_per_step = prompts_per_step
        self._plan = plan
        self._ask = ask
        self._past = TraceFold("recent steps")
        self._told = Folded(self._past)
        self._steps = 0
        self._found: Better | None = None
        self._asking: asyncio.Task[None] | None = None
        self._closed = False
        live.driver.pump.observers.append(self.observe)

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        actions = list(actions)
        self._told.observe(now, event, actions)
        if any(isinstance(action, Deliver) and action.last for action in actions):
            self._step_over()

    async def close(self) -> None:
        """Stop waiting for an answer."""
        self._closed = True
        if self._asking is not None:
            await asyncio.wait({self._asking})

    def _step_over(self) -> None:
        self._adopt()
        self._steps += 1
        if self._steps % self._plan.steps:
            return
        trace, self._steps = self._past, 0
        self._past = trace.successor()
        self._told = Folded(self._past)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._look(trace))

    async def _look(self, past: TraceFold) -> None:
        try:
            question = self._question(past)
            self._found = await asyncio.to_thread(self._ask, question, lambda: self._closed)
        except (CallerError, TraceError) as error:
            log.warning("retuning: the recent steps cannot be replayed: %s", error)
        except Exception:  # a failure of retuning must not stop the rollouts
            log.exception("retuning failed")
        else:
            if self._found is None and not self._closed:
                log.info("retuning: no candidate is better by more than the spread")

    def _question(self, past: TraceFold) -> Question:
        trace = past.trace("recent")
        job = msgspec.structs.replace(
            self._plan.scenario.job,
            prompts_per_step=self._prompts_per_step,
            samples_per_prompt=trace.group_size,
            max_tokens=trace.cap,
        )
        scenario = msgspec.structs.replace(self._plan.scenario, job=job)
        told = self._driver.view.tuned
        return Question(self._policy, told, trace, scenario, self._plan.limits)

    def _adopt(self) -> None:
        found, self._found = self._found, None
        if found is None:
            return
        self._driver.tell(Retuned(found.parameters))
        self.adopted.append(found)
        log.warning("retuned: %s (%s)", _shown(found.parameters), _ratio(found))


def _shown(parameters: dict[str, dict[str, Any]]) -> str:
    return ", ".join(
        f"{role}.{name} = {value:g}"
        for role, values in parameters.items()
        for name, value in values.items()
    )


def _ratio(found: Better) -> str:
    low, high = found.ratio.low, found.ratio.high
    return f"{found.ratio.value:.3f}x on the last steps, {low:.3f} to {high:.3f}"
