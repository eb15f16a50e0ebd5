"""A scheduler that is told events one by one, with its state checked after each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgspec
from sortedcontainers import SortedKeyList

from rollout_sched.config import parse_policy
from rollout_sched.core.model.actions import Action, Deliver, Discard, Dispatch
from rollout_sched.core.model.events import BatchRequested, Event, GroupSubmitted, InstanceJoined
from rollout_sched.core.model.model import (
    DeliveredSample,
    Group,
    Instance,
    Request,
    Segment,
    Siblings,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.core.state.state import State
from rollout_sched.core.work.parts import Parts
from tests.helpers import fields_of

PROMPT = 10
LIMIT = 100
BIG = 10_000

FULLY_ASYNC: dict[str, Any] = {"batching": "fully_async", "freshness": "unbounded"}


def make_scheduler(prompts_per_step: int = 1, *, version: int = 0, **roles: Any) -> Scheduler:
    """A scheduler from role tables; a bare string stands for its `use`."""
    tables = {role: {"use": of} if isinstance(of, str) else of for role, of in roles.items()}
    policy = parse_policy("test", tables)
    return policy.scheduler(prompts_per_step, version=version, lengths=lambda group, index: 7)


def make_parts(
    prompts_per_step: int = 1,
    *,
    version: int = 0,
    max_failures: int = 5,
    backoff_s: float = 1.0,
    **roles: Any,
) -> Parts:
    """The parts of a scheduler that has had no event, from policies or role tables."""
    tables = {role: of for role, of in roles.items() if isinstance(of, dict)}
    policies = {role: of for role, of in roles.items() if role not in tables}
    built = msgspec.structs.replace(parse_policy("test", tables).build(), **policies)
    return Parts(State(built, prompts_per_step, version), max_failures, backoff_s)


class Told:
    """`told(event)` answers with the actions; `told.seconds` is the time of the next event."""

    def __init__(
        self,
        prompts_per_step: int = 1,
        *,
        instances: int = 1,
        slots: int = 8,
        version: int = 0,
        **roles: Any,
    ) -> None:
        self.scheduler = make_scheduler(prompts_per_step, version=version, **roles)
        self.seconds = 0.0
        for number in range(instances):
            self(InstanceJoined(f"i{number}", slots, BIG, version))

    def __call__(self, *events: Event) -> list[Action]:
        """The actions that answer the last of `events`."""
        actions: list[Action] = []
        for event in events:
            actions = self.scheduler.handle(event, self.seconds)
            self.scheduler.check_invariants()
        return actions

    def submit(self, *groups: str, samples: int = 1) -> list[Action]:
        return self(*(GroupSubmitted(group, samples, PROMPT, LIMIT) for group in groups))

    def request(self, name: str) -> Request:
        return self.scheduler.parts.requests[name]

    def instance(self, name: str) -> Instance:
        return self.scheduler.state.fleet.instances[name]

    @property
    def anomalies(self) -> dict[str, int]:
        return dict(self.scheduler.state.anomalies)

    @property
    def running(self) -> list[str]:
        """Requests with an attempt in flight that is still wanted, by attempt."""
        attempts = self.scheduler.state.fleet.attempts.values()
        return [attempt.request.id for attempt in attempts if not attempt.abandoned]


def begun(*groups: str, samples: int = 1, **other: Any) -> Told:
    """A scheduler with these groups, whose trainer has asked for a batch."""
    told = Told(**other)
    told.submit(*groups, samples=samples)
    told(BatchRequested())
    return told


def sent(request: str, attempt: int, instance: str = "i0", **other: Any) -> Dispatch:
    """A first Dispatch under version 0, but for what `other` says; "a/1" is sample 1 of group a."""
    group, _, index = request.rpartition("/")
    usual = {"context_tokens": PROMPT, "max_new_tokens": LIMIT, "salt": 0}
    usual |= {"group": group, "index": int(index) if group else 0}
    return Dispatch(request, attempt, instance, **(usual | other))


def resumed(
    request: str, attempt: int, instance: str = "i0", *, made: int, **other: Any
) -> Dispatch:
    """A Dispatch that continues from so many tokens, which another attempt has computed."""
    usual = {"context_tokens": PROMPT + made, "max_new_tokens": LIMIT - made}
    usual |= {"response_tokens": made, "computed_tokens": PROMPT + made}
    return sent(request, attempt, instance, **(usual | other))


def thrown(request: str, tokens: int, reason: str, **other: Any) -> Discard:
    """A Discard; "a/1" is sample 1 of group a."""
    group, _, index = request.rpartition("/")
    usual = {"group": group, "index": int(index) if group else 0}
    return Discard(request, tokens, reason, **(usual | other))


def make_group(name: str = "a", *, requests: int = 1, samples: int = 1, serial: int = 0) -> Group:
    """A group with parked requests, known to nobody."""
    group = Group(name, serial, samples, Siblings(name, PROMPT, LIMIT))
    for index in range(requests):
        request = Request(f"{name}/{index}", group.siblings, group, index, index, PROMPT)
        group.requests.append(request)
    return group


def make_request(name: str = "a/0", *, serial: int = 0, context_tokens: int = PROMPT) -> Request:
    name_of_group, _, index = name.partition("/")
    group = make_group(name_of_group, requests=0)
    return Request(name, group.siblings, group, int(index), serial, context_tokens)


def delivered(actions: Iterable[Action]) -> list[str]:
    """The requests in a batch, if there is one."""
    batches = [action for action in actions if isinstance(action, Deliver)]
    return [sample.request for batch in batches for sample in batch.samples]


def dispatched(actions: Iterable[Action]) -> list[str]:
    return [action.request for action in actions if isinstance(action, Dispatch)]


def with_roles(told: Told, **roles: Any) -> Told:
    """The same, but asking these policies."""
    told.scheduler = Scheduler(msgspec.structs.replace(told.scheduler.roles, **roles), 1)
    return told


def tail(over_prompts: float, over_samples: float) -> dict[str, Any]:
    return {"use": "tail_batching", "over_prompts": over_prompts, "over_samples": over_samples}


def sample(
    request: str,
    *segments: tuple[int, int, str],
    staleness: int = 0,
    finish: str = "stop",
) -> DeliveredSample:
    """A sample from (version, tokens, instance) of each segment."""
    group, _, index = request.partition("/")
    made = tuple(Segment(*segment) for segment in segments)
    tokens = sum(segment.tokens for segment in made)
    return DeliveredSample(request, group, int(index), PROMPT, tokens, made, staleness, finish)


#: The heap of open instances, whose order depends on that of a set, and what its entries count.
AS_IT_COMES = {"_heap", "heap_version"}


def facts(scheduler: Scheduler) -> Any:
    """Everything the scheduler knows, as plain data; shared objects are shown by number."""
    seen: dict[int, tuple[int, Any]] = {}

    def plain(thing: Any) -> Any:
        if thing is None or isinstance(thing, str | int | float | Enum | type):
            return thing
        if isinstance(thing, tuple):
            return tuple(plain(part) for part in thing)
        if id(thing) in seen:
            return f"#{seen[id(thing)][0]}"
        seen[id(thing)] = len(seen), thing
        if isinstance(thing, dict):
            return [(plain(key), plain(value)) for key, value in thing.items()]
        if isinstance(thing, list | deque | SortedKeyList):
            return [plain(part) for part in thing]
        if isinstance(thing, msgspec.Struct):
            return [type(thing)] + [plain(getattr(thing, f)) for f in thing.__struct_fields__]
        if callable(thing):
            return getattr(thing, "__qualname__", repr(thing))
        if isinstance(thing, set):
            return [plain(each) for each in sorted(thing, key=repr)]
        return [type(thing), plain({k: v for k, v in attributes(thing) if k not in AS_IT_COMES})]

    def attributes(thing: Any) -> list[tuple[str, Any]]:
        if hasattr(thing, "__dict__"):
            return list(vars(thing).items())
        return list(fields_of(thing).items())  # without a dictionary for each object

    return plain(scheduler)
