"""What somebody else does to an instance is seen, and only looked for where there is a reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollout_sched.core.model.events import GateClosed, GateOpened, WeightsPublished, WeightsUpdated
from rollout_sched.live.instances.engine_watch import EngineWatch
from rollout_sched.live.instances.instance import FOUND_PAUSED, FleetInstance
from rollout_sched.live.instances.pause import HOLD, PAUSE, RELEASE, RESUME, PausedBy, PauseMove
from rollout_sched.live.instances.versions import AROUND_US, FleetVersions
from rollout_sched.live.ports import Gauges, InstanceError
from rollout_sched.live.settings import Settings
from tests.live.instances.test_versions import Pump
from tests.live.scripted import Scripted

SETTINGS = Settings(misses=2)


class Stage:
    """An instance at version 4, as it joined, looked at once already."""

    def __init__(self, *capabilities: str, client: Scripted | None = None, **settings: Any) -> None:
        self.client = client or Scripted("i0")
        self.client.weights = 4
        offers = frozenset(capabilities or ("pause", "weight_info"))
        self.description = msgspec.structs.replace(self.client.description, capabilities=offers)
        self.pump = Pump(version=4)
        self.versions = FleetVersions(self.pump, self.pump.scheduler.scheduler.view)
        self.settings = msgspec.structs.replace(SETTINGS, **settings)
        self.instance = FleetInstance(self.client, self)
        self.instance.health.forget_progress = self._go_on
        self.pause, self.lock = self.instance.pause, self.instance.control_lock
        self.resumed_from_others = 0
        self.wrong: list[str] = []
        self.watch = EngineWatch(self.instance, self.wrong.append)
        self._made = 0

    def resumed(self, name: str) -> None: ...

    def _go_on(self) -> None:
        self.resumed_from_others += 1

    async def look(self, *, moved: bool = False) -> list[str]:
        """What is asked after a poll."""
        self._made += moved
        self.client.questions.clear()
        await self.watch.look(self.description, Gauges(1, 0, 0.5, generated_tokens=self._made))
        return list(self.client.questions)


class TestWhenItIsAsked:
    async def test_progressing_instance_is_not_asked(self) -> None:
        stage = Stage()
        for _ in range(3):
            assert await stage.look(moved=True) == []

    async def test_stalled_instance_is_asked_for_pause_and_weights(self) -> None:
        stage = Stage()
        await stage.look(moved=True)
        assert await stage.look() == ["paused", "weights"]

    async def test_suspicion_asks_once(self) -> None:
        stage = Stage()
        stage.watch.suspect()
        assert await stage.look(moved=True) == ["paused", "weights"]
        assert await stage.look(moved=True) == []

    async def test_missing_capabilities_are_not_asked(self) -> None:
        stage = Stage("generate")
        await stage.look(moved=True)
        assert await stage.look() == []

    async def test_controlled_instance_is_not_asked(self) -> None:
        stage = Stage()
        await stage.look(moved=True)
        async with stage.lock:
            assert await stage.look() == []


class TestPauses:
    async def paused(self, **settings: Any) -> Stage:
        stage = Stage(**settings)
        await stage.look(moved=True)
        stage.client.paused = True
        assert await stage.look() == ["paused"]
        return stage

    async def test_gate_is_closed_until_the_instance_resumes(self) -> None:
        stage = await self.paused()
        assert stage.pause.by is PausedBy.SOMEBODY_ELSE
        assert stage.pump.told == [GateClosed("i0")]
        assert stage.versions.gate("i0") == FOUND_PAUSED
        await stage.look()
        stage.client.paused = False
        await stage.look()
        assert stage.pause.by is PausedBy.NOBODY
        assert stage.pump.told == [GateClosed("i0"), GateOpened("i0")]
        assert stage.resumed_from_others == 1

    @pytest.mark.parametrize("verbs", [(PAUSE, RESUME), (HOLD, RELEASE), (RELEASE,)])
    async def test_gate_does_not_outlive_a_pause_that_ours_replaces(
        self, verbs: tuple[PauseMove, ...]
    ) -> None:
        stage = await self.paused()
        stage.client.paused = False
        for verb in verbs:
            stage.pause.move(verb)
        assert stage.versions.gate("i0") == ""
        assert stage.pump.told == [GateClosed("i0"), GateOpened("i0")]

    async def test_the_version_is_known_before_the_gate_opens(self) -> None:
        stage = await self.paused()
        stage.client.weights, stage.client.paused = 5, False
        await stage.look()
        assert stage.pump.told[1:] == [
            WeightsPublished(5, loads=False),
            WeightsUpdated("i0", 5),
            GateOpened("i0"),
        ]

    async def test_a_paused_instance_may_finish_its_requests(self) -> None:
        stage = await self.paused()
        stage.client.weights = 5
        assert await stage.look(moved=True) == ["paused"]
        stage.client.paused = False
        assert await stage.look(moved=True) == ["paused", "weights"]
        assert stage.pause.by is PausedBy.NOBODY
        assert stage.pump.told[-1] == GateOpened("i0")

    async def test_a_dead_engine_is_not_paused(self) -> None:
        """Its front still answers polls: that is no reason to wait for its tokens for ever."""

        class Dead(Scripted):
            dying = False

            async def is_paused(self) -> bool | None:
                if self.dying:
                    raise InstanceError("the engine has died")
                return await super().is_paused()

        client = Dead("i0")
        stage = await self.paused(client=client)
        client.dying = True
        await stage.look()
        assert stage.pause.by is PausedBy.SOMEBODY_ELSE, "once may be chance"
        await stage.look()
        assert stage.pause.by is PausedBy.NOBODY


class TestVersions:
    async def test_idle_instance_with_newer_weights_is_found(self) -> None:
        stage = Stage()
        await stage.look(moved=True)
        stage.client.weights = 6
        await stage.look()
        assert stage.versions.version_of("i0").version == 6
        assert stage.wrong == []

    async def test_newer_weights_are_wrong_by_policy(self) -> None:
        stage = Stage(on_contradiction="refuse")
        await stage.look(moved=True)
        stage.client.weights = 6
        await stage.look()
        assert stage.versions.version_of("i0").version == 4
        (why,) = stage.wrong
        assert "version 6, but version 4 was loaded" in why

    @pytest.mark.parametrize("policy", ["server", "refuse"])
    async def test_older_weights_are_always_wrong(self, policy: str) -> None:
        """As after a restart that nobody noticed: it must be brought to the newest first."""
        stage = Stage(on_contradiction=policy)
        await stage.look(moved=True)
        stage.client.weights = 3
        await stage.look()
        assert len(stage.wrong) == 1

    async def test_stale_version_answer_is_ignored(self) -> None:
        """While it answered, an answer to a request told of newer weights."""

        class Late(Scripted):
            versions: FleetVersions

            async def weight_version(self) -> int | None:
                said = await super().weight_version()
                self.versions.moved("i0", 5, AROUND_US)
                return said

        client = Late("i0")
        stage = Stage(client=client)
        client.versions = stage.versions
        await stage.look(moved=True)
        await stage.look()
        assert stage.wrong == []
        assert stage.versions.version_of("i0").version == 5

    async def test_missing_version_changes_nothing(self) -> None:
        stage = Stage()
        await stage.look(moved=True)
        stage.client.weights = None
        await stage.look()
        assert stage.wrong == []
        assert stage.pump.told == []
