"""The lengths of prompts outlive the run, and a disk that fails costs nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollout_sched import load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import GroupSubmitted
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.settings import RunOptions
from rollout_sched.live.trainer import lengths as length_store
from rollout_sched.live.trainer.lengths import LengthStore
from rollout_sched.live.trainer.samples import Prompt
from tests import virtual_net
from tests.live.scripted import Scripted, until

KNOWN = GroupSubmitted("a@1", 2, 10, 100, "a")


def in_file(path: Path) -> Any:
    return json.loads(path.read_bytes())["lengths"]


def run(path: Path, *delivered: tuple[GroupSubmitted, list[int]]) -> None:
    async def scene() -> None:
        store = LengthStore(path)
        for submitted, lengths in delivered:
            store.delivered(submitted, lengths)
        await store.close()
        assert not store.broken

    virtual_net.run(scene())


def known_of(path: Path, submitted: GroupSubmitted) -> tuple[int, ...]:
    async def scene() -> tuple[int, ...]:
        store = LengthStore(path)
        found = store.complete(submitted).history
        await store.close()
        return found

    return virtual_net.run(scene())


def test_next_run_starts_with_the_learned_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    run(path, (KNOWN, [9, 7]))
    run(path, (KNOWN, [5]))
    assert in_file(path) == {"a": [5, 7, 9]}
    assert known_of(path, KNOWN) == (5, 7, 9)


def test_history_of_the_trainer_takes_precedence(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    run(path, (KNOWN, [9]))
    told = GroupSubmitted("a@1", 2, 10, 100, "a", (3,))
    assert known_of(path, told) == (3,)


def test_a_prompt_that_is_new_or_has_no_name(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    run(path, (GroupSubmitted("b", 1, 10, 100), [9]))
    assert in_file(path) == {}
    assert known_of(path, KNOWN) == ()
    assert known_of(path, GroupSubmitted("b", 1, 10, 100)) == ()


def test_trainer_history_is_stored_with_learned_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    run(path, (GroupSubmitted("a@1", 2, 10, 100, "a", (3,)), [9]))
    assert in_file(path) == {"a": [3, 9]}


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"schema":"other/1","lengths":{}}', '{"lengths":{"a":[-1]}}']
)
async def test_a_file_of_something_else_is_not_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(text)

    with pytest.raises(CallerError, match=r"cannot be read.*move it away"):
        LengthStore(path)
    assert path.read_text() == text


async def test_unwritable_path_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="cannot be written"):
        LengthStore(tmp_path / "nowhere" / "lengths.json")


async def test_file_is_written_during_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length_store, "SAVE_S", 0.001)
    path = tmp_path / "lengths.json"
    store = LengthStore(path)
    store.delivered(KNOWN, [9])
    await until(lambda: in_file(path) == {"a": [9]})
    await store.close()


async def test_a_disk_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(length_store, "SAVE_S", 0.001)
    path = tmp_path / "lengths.json"
    write = length_store._write

    def full(path: Path, text: bytes) -> None:
        raise OSError(28, "No space left on device")

    store = LengthStore(path)
    monkeypatch.setattr(length_store, "_write", full)
    store.delivered(KNOWN, [9])
    await until(lambda: store.broken)
    assert "No space left" in store.broken
    assert in_file(path) == {}
    monkeypatch.setattr(length_store, "_write", write)
    await until(lambda: not store.broken)
    await store.close()
    assert in_file(path) == {"a": [9]}
    assert str(path) in caplog.text


def test_a_disk_that_fails_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lengths.json"

    def full(path: Path, text: bytes) -> None:
        raise OSError(28, "No space left on device")

    async def scene() -> LengthStore:
        store = LengthStore(path)
        monkeypatch.setattr(length_store, "_write", full)
        store.delivered(KNOWN, [9])
        await store.close()
        return store

    assert "No space left" in virtual_net.run(scene()).broken
    assert in_file(path) == {}


def test_a_live_run_learns_and_the_next_one_knows(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    options = RunOptions(prompts_per_step=1, length_history=path)

    async def scene() -> tuple[int, ...]:
        live = LiveScheduler(load_policy("round_robin_sync"), options)
        submitted: list[GroupSubmitted] = []
        live.driver.pump.watch(submitted.append, GroupSubmitted)
        instance = Scripted()
        await live.driver.add_instance(instance)
        live.trainer.submit([Prompt("a@1", [1], 2, 9, prompt_key="a")])
        asking = asyncio.create_task(live.trainer.next_batch())
        await instance.answer(0, [5])
        await instance.answer(1, [6, 7])
        assert await asking is not None
        state = live.state()["length_history"]
        assert state == {"path": str(path), "prompts": 1, "broken": ""}
        await live.close()
        return submitted[0].history

    assert virtual_net.run(scene()) == ()
    assert in_file(path) == {"a": [1, 2]}
    assert virtual_net.run(scene()) == (1, 2)
    assert in_file(path) == {"a": [1, 1, 2, 2]}
