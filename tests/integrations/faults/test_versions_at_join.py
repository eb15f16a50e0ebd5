"""Instances that say which weights they have: refused, adopted, loaded first, or believed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_sched.client import RolloutScheduler
from rollout_sched.core.model.events import RequestFailed
from tests.integrations.faults.fleet import events, house
from tests.integrations.faults.test_weights_around_us import (
    FAST,
    PATIENT,
    PROMPTS,
    SLOW,
    as_clients,
    label,
    load_around_us,
    loaded,
    until_all_have_begun,
    versions,
    weights,
)
from tests.live.scripted import until


async def test_a_trained_fleet_before_a_new_trainer_is_refused_with_a_remedy(
    tmp_path: Path,
) -> None:
    """Else it would be handed tokens of version 4 as its own of version 0."""
    async with house(tmp_path, settings=PATIENT, labels=["4", "4"]) as the:
        for number in range(2):
            reason = the.driver.supervisors[the.name(number)].reason
            assert "version 4, but the trainer is at 0" in reason
            assert "--start-version 4" in reason
            assert "--start-version auto" in reason
        assert versions(the) == []


@pytest.mark.parametrize("start_version", [4, "auto"])
async def test_a_start_version_adopts_a_trained_fleet(tmp_path: Path, start_version: Any) -> None:
    async with house(
        tmp_path, settings=PATIENT, labels=["4", "4"], start_version=start_version
    ) as the:
        assert versions(the) == [4, 4]
        assert await as_clients(stream=True)(the) == [[4]] * len(PROMPTS)
        async with RolloutScheduler.connect(the.url) as rollouts:
            await rollouts.publish_weights(5, weights(tmp_path), wait=True)
        assert await as_clients(stream=False)(the) == [[5]] * len(PROMPTS)
        assert the.anomalies == {}


async def test_versions_are_not_adopted_after_the_first_publication(tmp_path: Path) -> None:
    async with house(tmp_path, settings=PATIENT, start_version="auto") as the:
        async with RolloutScheduler.connect(the.url) as rollouts:
            await rollouts.publish_weights(1, weights(tmp_path), wait=True)
        await the.servers[0].restart(0.05, "7")
        supervisor = the.driver.supervisors[the.name(0)]
        await until(lambda: "version 7, but the trainer is at 1" in supervisor.reason)


async def test_an_older_one_gets_the_weights_before_its_first_request(tmp_path: Path) -> None:
    """It comes late, and nobody else is stopped for it."""
    async with house(tmp_path, settings=PATIENT, labels=["default", "7"]) as the:
        async with RolloutScheduler.connect(the.url) as rollouts:
            await rollouts.publish_weights(8, weights(tmp_path), wait=True)
        await until(lambda: versions(the) == [8, 8] and loaded(the))
        assert await as_clients(stream=False)(the) == [[8]] * len(PROMPTS)
        assert the.anomalies == {}


async def test_an_older_one_waits_where_nobody_knows_how_to_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with house(tmp_path, settings=PATIENT, labels=["4", "2"], start_version=4) as the:
            await asyncio.sleep(10 * PATIENT.poll_s)
            assert versions(the) == [4]
            await label(the.clients[1], 4)
            await until(lambda: versions(the) == [4, 4])
    assert len([said for said in caplog.messages if "has version 2" in said]) == 1


class TestLies:
    async def test_an_answer_that_its_server_contradicts_is_made_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            async with house(tmp_path, settings=PATIENT) as the:
                the.strike(0, "wrong_version", times=2)
                labelled = await as_clients(stream=False)(the)
                assert labelled == [[0]] * len(PROMPTS)
                assert the.driver.view.run.version == 0
                assert the.driver.versions.contradictions == {"newer": 2}
                assert the.anomalies == {}
        failed = [e for e in events(tmp_path) if isinstance(e, RequestFailed)]
        assert len(failed) == 2
        assert all("names version 1" in e.reason and not e.usable for e in failed)
        assert len([said for said in caplog.messages if "answers with versions" in said]) == 1

    async def test_by_policy_weights_that_are_not_ours_are_refused(self, tmp_path: Path) -> None:
        """The instance stays away until its version is right; its answers are made elsewhere."""
        refuses = msgspec.structs.replace(PATIENT, on_contradiction="refuse")
        async with house(tmp_path, settings=refuses, speed=SLOW) as the:
            asking = asyncio.create_task(as_clients(stream=False)(the))
            await the.clients[0].until_generated(5)
            await load_around_us(the, 3, "keep", 0)
            the.set_speed(FAST)
            assert await asking == [[0]] * len(PROMPTS)
            supervisor = the.driver.supervisors[the.name(0)]
            await until(lambda: "version 3, but the trainer is at 0" in supervisor.reason)
            assert the.driver.view.run.version == 0
            async with RolloutScheduler.connect(the.url) as rollouts:
                await rollouts.publish_weights(4, weights(tmp_path))
            await until(lambda: versions(the) == [4, 4])

    async def test_an_instance_without_weight_info_is_believed_by_its_answers(
        self, tmp_path: Path
    ) -> None:
        async with house(tmp_path, 1, settings=PATIENT, speed=SLOW) as the:
            the.servers[0].engine.weights.says = None
            asking = asyncio.create_task(as_clients(stream=True)(the))
            await until_all_have_begun(the)
            await load_around_us(the, 3, "keep")
            the.set_speed(FAST)
            assert [set(each) for each in await asking] == [{0, 3}] * len(PROMPTS)
            assert versions(the) == [3]
