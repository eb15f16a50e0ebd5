"""What speaks against an instance's joining, and what is done so that nothing does."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from rollout_sched.core.model.events import Event
from rollout_sched.live.instances.admission import (
    InstanceAdmission,
    JoiningVersion,
    JoinsLater,
    RequiredModel,
    VersionRefused,
    settle_pause,
    with_required_model,
)
from rollout_sched.live.instances.instance import FleetInstance
from rollout_sched.live.instances.membership import MembershipMove, MembershipState
from rollout_sched.live.instances.pause import InstancePause, PausedBy, PauseMove
from rollout_sched.live.instances.versions import FleetVersions
from rollout_sched.live.ports import Description, InstanceError
from rollout_sched.live.settings import Settings
from tests import virtual_net
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted

PLAIN = Description(8, 1000, 1000)
PAUSABLE = msgspec.structs.replace(PLAIN, capabilities=frozenset({"pause"}))

NOBODY, US, ADMINISTRATOR, BOTH, SOMEBODY_ELSE = PausedBy
RESUME, HOLD = "resume", ("pause", "keep", False)


@pytest.mark.parametrize(
    ("by", "found_paused", "asked", "after"),
    [
        (NOBODY, False, [], NOBODY),
        (NOBODY, True, "refused", SOMEBODY_ELSE),
        (NOBODY, None, [RESUME], NOBODY),
        (US, False, [], NOBODY),
        (US, True, [RESUME], NOBODY),
        (US, None, [RESUME], NOBODY),
        (ADMINISTRATOR, False, [HOLD], ADMINISTRATOR),
        (ADMINISTRATOR, True, [], ADMINISTRATOR),
        (ADMINISTRATOR, None, [HOLD], ADMINISTRATOR),
        (BOTH, False, [HOLD], ADMINISTRATOR),
        (BOTH, True, [], ADMINISTRATOR),
        (SOMEBODY_ELSE, False, [], NOBODY),
        (SOMEBODY_ELSE, True, "refused", SOMEBODY_ELSE),
    ],
)
def test_instance_joins_paused_only_if_held(
    by: PausedBy, found_paused: bool | None, asked: Any, after: PausedBy
) -> None:
    client, pause = Scripted(), InstancePause("i0")
    pause.by = by
    description = msgspec.structs.replace(PAUSABLE, paused=found_paused)
    settling = settle_pause(client, description, pause, Settings())
    if asked == "refused":
        with pytest.raises(InstanceError, match=r"not by us.*POST i0/resume.*resume_paused"):
            virtual_net.run(settling)
        assert client.calls == []
    else:
        virtual_net.run(settling)
        assert client.calls == asked
    assert pause.by is after


def test_paused_instance_is_resumed_on_request() -> None:
    client, pause = Scripted(), InstancePause("i0")
    description = msgspec.structs.replace(PAUSABLE, paused=True)
    virtual_net.run(settle_pause(client, description, pause, Settings(resume_paused=True)))
    assert (client.calls, pause.by) == ([RESUME], NOBODY)


@pytest.mark.parametrize("by", PausedBy)
def test_instance_without_pause_joins_unless_held(by: PausedBy) -> None:
    client, pause = Scripted(), InstancePause("i0")
    pause.by = by
    settling = settle_pause(client, PLAIN, pause, Settings())
    if by in (ADMINISTRATOR, BOTH):
        with pytest.raises(InstanceError, match=r"held.*release it.*VLLM_SERVER_DEV_MODE"):
            virtual_net.run(settling)
    else:
        virtual_net.run(settling)
        assert pause.by is NOBODY
    assert client.calls == []


@pytest.mark.parametrize(
    ("model", "required", "known_as"),
    [
        ("llama", "", "llama"),
        ("llama", "llama", "llama"),
        ("", "llama", ""),  # it does not say
    ],
)
def test_instance_with_the_fleets_model_joins(model: str, required: str, known_as: str) -> None:
    description = msgspec.structs.replace(PLAIN, model=model)
    found = with_required_model(Scripted(), description, RequiredModel(required))
    assert found.model == known_as


@pytest.mark.parametrize(
    ("of_run", "said"),
    [
        (False, "the other instances serve llama.* or remove the instances that serve llama"),
        (True, "samples of this run come from llama.* or restart the gateway .*--store"),
    ],
)
def test_another_model_is_refused_with_both_names(of_run: bool, said: str) -> None:
    description = msgspec.structs.replace(PLAIN, model="qwen", models=("qwen", "tuned"))
    with pytest.raises(InstanceError, match=f"serves qwen, tuned, but .*{said}"):
        with_required_model(Scripted(), description, RequiredModel("llama", of_run))


def test_instance_with_several_models_serves_the_fleets() -> None:
    class Several(Scripted):
        used = ""

        def use_model(self, model: str) -> None:
            self.used = model

    client = Several()
    description = msgspec.structs.replace(PLAIN, model="base", models=("base", "tuned"))
    found = with_required_model(client, description, RequiredModel("tuned"))
    assert found.model == "tuned"
    assert client.used == "tuned"


class Fleet:
    """What an instance joins (`instances.fleet.LiveFleet`)."""

    first_version = 0

    def __init__(self, model: str = "", *, newest: int = 0, can_load: bool = False) -> None:
        self.settings = Settings()
        self.newest_version = newest
        self.can_load = can_load
        self.versions = FleetVersions(self, make_scheduler().view)
        self.joined: list[tuple[str, str, int]] = []
        self._required = RequiredModel(model)

    def resumed(self, name: str) -> None: ...

    def required_model(self, instance: str) -> RequiredModel:
        return self._required

    def check_precision(self, instance: str, precision: str) -> None: ...

    def join(self, name: str, description: Description, version: int) -> None:
        self.joined.append((name, description.model, version))

    def tell(self, event: Event) -> None:
        raise AssertionError(f"nothing is told but that it joins, not {event}")


class Coming:
    """One instance that comes to a fleet. Make it inside a running event loop."""

    def __init__(self, fleet: Fleet, description: Description) -> None:
        self.client = Scripted()
        self.client.description = description
        self.instance = FleetInstance(self.client, fleet)
        self.membership, self.pause = self.instance.membership, self.instance.pause
        self.began: list[Description] = []
        self.admission = InstanceAdmission(self.instance, self.began.append)


class TestAdmission:
    async def test_joined_instance_has_the_model_of_the_fleet(self) -> None:
        fleet = Fleet("m")
        one = Coming(fleet, msgspec.structs.replace(PLAIN, version=0, model="m"))
        await one.admission.admit()
        assert fleet.joined == [("i0", "m", 0)]
        assert one.began == [one.client.description]
        assert one.membership.state is MembershipState.JOINED
        assert one.instance.description == one.client.description

    async def test_instance_with_older_weights_waits_without_a_loader(self) -> None:
        fleet = Fleet(newest=2)
        one = Coming(fleet, msgspec.structs.replace(PLAIN, version=1))
        with pytest.raises(JoinsLater) as why:
            await one.admission.admit()
        one.admission.refuse(why.value)
        assert one.admission.awaits_weights
        assert "the trainer is at 2" in one.membership.reason
        assert fleet.joined == []
        fleet.can_load = True
        await one.admission.admit()
        assert not one.admission.awaits_weights
        assert fleet.joined == [("i0", "", 1)]

    async def test_unfit_instance_joins_only_after_a_restart(self) -> None:
        fleet = Fleet()
        one = Coming(fleet, msgspec.structs.replace(PLAIN, version=0, started_at=1.0))
        await one.admission.admit()
        one.membership.move(MembershipMove.DISQUALIFY, "its weights could not be loaded")
        with pytest.raises(InstanceError, match="could not be loaded"):
            await one.admission.admit()
        one.client.describes(started_at=2.0)
        await one.admission.admit()
        assert one.admission.started_at == 2.0
        assert len(fleet.joined) == 2

    async def test_a_restart_ends_every_pause_but_a_hold(self) -> None:
        one = Coming(Fleet(), msgspec.structs.replace(PAUSABLE, version=0, started_at=1.0))
        await one.admission.admit()
        one.pause.move(PauseMove.HOLD)
        one.membership.move(MembershipMove.LOSE, "gone")
        one.client.describes(started_at=2.0)
        await one.admission.admit()
        assert one.client.calls == [RESUME, HOLD], "it is paused again before it joins"


def settle(
    instance: JoiningVersion,
    told: int | None,
    newest: int,
    *,
    follows: bool = False,
    can_load: bool = False,
) -> int:
    return instance.settle(told, newest, follows=follows, can_load=can_load)


class TestItTells:
    def test_instance_with_the_trainers_version_joins(self) -> None:
        assert settle(JoiningVersion("i0", 4), 4, 4) == 4

    def test_newer_version_is_refused_with_the_remedy(self) -> None:
        """A trainer that starts anew before instances that another run has trained."""
        with pytest.raises(VersionRefused) as refused:
            settle(JoiningVersion("i0", 0), 4, 0)
        text = str(refused.value)
        assert "version 4, but the trainer is at 0" in text
        for remedy in ("--start-version 4", "version=4", "--start-version auto", 'version="auto"'):
            assert remedy in text

    def test_newer_version_is_adopted_by_policy(self) -> None:
        assert settle(JoiningVersion("i0", 0), 4, 0, follows=True) == 4

    def test_older_version_is_loaded_before_joining(self) -> None:
        assert settle(JoiningVersion("i0", 0), 2, 5, can_load=True) == 2

    @pytest.mark.parametrize("follows", [False, True])
    def test_older_version_waits_without_a_loader(self, follows: bool) -> None:
        with pytest.raises(
            JoinsLater, match=r"version 2, the trainer is at 5.*/weight_info reports 5"
        ):
            settle(JoiningVersion("i0", 0), 2, 5, follows=follows)


class TestItDoesNotTell:
    def test_unlabelled_instance_has_the_first_weights(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        instance = JoiningVersion("i0", 4)
        with caplog.at_level(logging.WARNING):
            assert settle(instance, None, 4) == settle(instance, None, 4) == 4
        (said,) = caplog.messages
        assert "i0 does not report" in said
        assert "assuming 4" in said

    def test_no_warning_before_training(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            assert settle(JoiningVersion("i0", 0), None, 0) == 0
        assert caplog.messages == []

    def test_late_unlabelled_instance_is_loaded_or_waits(self) -> None:
        assert settle(JoiningVersion("i0", 4), None, 6, can_load=True) == 4
        with pytest.raises(JoinsLater, match="version 4, the trainer is at 6"):
            settle(JoiningVersion("i0", 4), None, 6)

    def test_restarted_instance_has_the_weights_of_its_start(self) -> None:
        instance = JoiningVersion("i0", 0)
        assert settle(instance, 0, 0) == 0
        assert settle(instance, None, 0) == 0
        with pytest.raises(JoinsLater, match="version 0, the trainer is at 1"):
            settle(instance, None, 1)

    def test_unknown_start_weights_are_loaded_first(self) -> None:
        """It had version 4 when we first saw it, and not from its start."""
        instance = JoiningVersion("i0", 4)
        assert settle(instance, 4, 4) == 4
        with pytest.raises(JoinsLater, match="unknown version"):
            settle(instance, None, 4)
        assert settle(instance, 4, 4) == 4, "somebody has labelled it"
        assert settle(instance, None, 5, can_load=True) < 5, "it is loaded before it serves"
