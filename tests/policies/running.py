"""A hand-made fleet on which requests run, for policies that look at what is running."""

from __future__ import annotations

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import Attempt, RequestState
from rollout_sched.policies.routing import LeastRequests
from tests.helpers import Loads, make_request


class Running(Loads):
    """Instances with a million tokens of KV cache each; polls say what is told them."""

    def __init__(self, instances: int, *, slots: int = 100) -> None:
        super().__init__(LeastRequests(), instances, slots=slots)

    def run(self, number: int, *made: int, context: int = 100) -> list[Attempt]:
        """Requests that have made so many tokens, and are streamed if they have made any."""
        attempts = []
        for tokens in made:
            request = make_request(context=context)
            request.siblings.max_tokens = 50_000
            request.state = RequestState.RUNNING
            request.attempt = self.fleet.send(request, self[number], 50_000)
            request.attempt.tokens = tokens
            attempts.append(request.attempt)
        return attempts

    def poll(self, number: int, *usages: float, running: int = 0, waiting: int = 0) -> None:
        instance = self[number]
        for usage in usages:
            instance.report_before = instance.report
            running = running or instance.in_flight
            instance.report = InstanceReported(instance.id, running, waiting, usage)
