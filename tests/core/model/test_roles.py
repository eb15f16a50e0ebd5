"""Roles: every policy we ship answers every question of its role, in the words of the role."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest

from rollout_sched.config import REGISTRY, parse_policy
from rollout_sched.core.model import roles
from rollout_sched.core.model.events import BatchRequested, RequestFinished
from rollout_sched.core.model.model import Instance
from rollout_sched.core.state.fleet import Fleet
from rollout_sched.core.state.progress import RunProgress
from tests.core.told import FULLY_ASYNC, Told, begun, make_group

ROLES: dict[str, Any] = typing.get_type_hints(roles.Roles)

every_policy = pytest.mark.parametrize(
    ("role", "use"), [(role, use) for role, uses in REGISTRY.items() for use in uses]
)


def tables(role: str, use: str) -> dict[str, Any]:
    """One policy among defaults that suit every other: some batching makes nothing fresh."""
    return {"freshness": {"use": "bounded", "max_staleness": 1}, role: {"use": use}}


def make_policy(role: str, use: str) -> Any:
    policy = parse_policy("test", tables(role, use))
    return getattr(policy.build(lengths=lambda group, index: 7), role)


def questions(cls: Any) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


def parameters(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


@every_policy
def test_a_policy_has_what_its_role_asks_for(role: str, use: str) -> None:
    policy = make_policy(role, use)
    for name in questions(ROLES[role]):
        asked = vars(ROLES[role])[name]
        answer = getattr(policy, name)
        if not inspect.isfunction(asked):
            assert not callable(answer), f"{name} is a fact, not a question"
        else:
            assert parameters(answer) == parameters(asked)


@pytest.mark.parametrize(
    ("protocol", "cls"), [(roles.Progress, RunProgress), (roles.FleetView, Fleet)]
)
def test_views_have_what_policies_may_read(protocol: Any, cls: Any) -> None:
    told = Told()
    view = told.scheduler.state.progress if cls is RunProgress else told.scheduler.state.fleet
    assert isinstance(view, cls)
    for name in questions(protocol):
        assert hasattr(view, name)


@pytest.fixture
def told() -> Told:
    """a/0 has finished, a/1 and b/0 run, c/0 waits."""
    told = Told(2, instances=2, slots=1, **FULLY_ASYNC)
    told(BatchRequested())
    told.submit("a", samples=2)
    told.submit("b", "c")
    told(RequestFinished("a/0", 1, 5))
    return told


Check = Callable[[Any, Told], bool]
CHECKS: dict[str, Check] = {
    "routing": lambda p, t: (
        p.load(t.instance("i0")) <= p.load(t.instance("i0"))
        and isinstance(p.choose(t.request("c/0"), t.scheduler.state.fleet), Instance | None)
    ),
    "affinity": lambda p, t: (
        isinstance(p.keeps_sessions, bool)
        and isinstance(p.stays(t.request("c/0"), t.instance("i0"), t.instance("i1")), bool)
    ),
    "ordering": lambda p, t: p.key(t.request("b/0")) <= p.key(t.request("b/0")),
    "admission": lambda p, t: isinstance(p.admits(t.instance("i0")), bool),
    "prediction": lambda p, t: (
        isinstance(p.expect(t.request("a/1")), int)
        and isinstance(p.estimate(t.scheduler.state.groups["a"].siblings), int | None)
    ),
    "batching": lambda p, t: (
        isinstance(p.launch(t.scheduler.state.progress), roles.Launch | None)
        and isinstance(p.batch(t.scheduler.state.progress), int)
        and isinstance(p.stops_at_delivery, bool)
        and isinstance(p.part_prompts, int)
    ),
    "selection": lambda p, t: (
        p.window >= 0
        and [group.id for group in p.choose([make_group("x"), make_group("y")], 1, [])]
        in (["x"], ["y"])
    ),
    "freshness": lambda p, t: (
        isinstance(p.room(t.scheduler.state.progress), int)
        and isinstance(p.oldest_allowed(3), int)
        and isinstance(p.must_wait(t.scheduler.state.progress, {0: 2}, 1), bool)
    ),
    "interruption": lambda p, t: (
        isinstance(p.keeps_partial, bool)
        and isinstance(p.keeps_kv, bool)
        and p.at_update in ("drain", "in_place", "resubmit")
        and isinstance(p.budgeted, bool)
        and isinstance(p.limit(t.request("a/1")), int | None)
    ),
    "weights": lambda p, t: (
        set(p.choose((t.instance("i0"),), t.scheduler.state.progress)) <= {t.instance("i0")}
    ),
    "migration": lambda p, t: (
        p.interval_s > 0
        and all(isinstance(m, roles.Migrant) for m in p.choose(t.scheduler.state.fleet))
    ),
    "lending": lambda p, t: (
        isinstance(p.lends, bool)
        and set(p.choose(t.scheduler.state.fleet, t.scheduler.state.progress))
        < set(t.scheduler.state.fleet.instances.values())
    ),
}


def test_every_role_is_checked() -> None:
    assert set(CHECKS) == set(ROLES) == set(REGISTRY)


@every_policy
def test_a_policy_answers_with_data(role: str, use: str, told: Told) -> None:
    assert CHECKS[role](make_policy(role, use), told)


@every_policy
def test_a_policy_can_serve(role: str, use: str) -> None:
    told = begun("a", **tables(role, use))
    assert told.running[0] == "a/0"


@pytest.mark.parametrize(
    ("role", "use"), [(role, use) for role in ("routing", "admission") for use in REGISTRY[role]]
)
def test_policy_not_weighing_tokens_ignores_them(role: str, use: str, told: Told) -> None:
    """Or the fleet would not notice that its answer has changed."""
    policy = make_policy(role, use)
    instance = told.instance("i0")
    instance.slots = 9
    ask = policy.load if role == "routing" else policy.admits
    answers = set()
    for instance.tokens in (0, 10**9):
        answers.add(ask(instance))
    assert len(answers) == 1 or policy.weighs_tokens
