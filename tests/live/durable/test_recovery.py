"""What a store holds of a run, as far as it is whole."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

import msgspec
import pytest

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.records import (
    DeliveredSample,
    GroupFacts,
    Launch,
    RequestFacts,
    RunFacts,
    RunState,
    Segment,
)
from rollout_sched.live.durable.recovery import RestoredPayloads, recover
from rollout_sched.live.requests.token_payload import Piece, TokenPayload, TokenTranscript
from rollout_sched.live.trainer import records as facts
from rollout_sched.live.trainer.delivery import LeaseFacts
from rollout_sched.live.trainer.records import ONE, StoredLoss, StoredTranscripts, encoded
from rollout_sched.live.trainer.samples import FailedGroup, LostGroup, Prompt, Reward
from rollout_sched.live.trainer.stored import Recovered, StoredWeights
from rollout_sched.store.errors import StoreError
from rollout_sched.store.store import LOG_PAGES, PAGE, SPARE, Store
from rollout_sched.store.transaction import Transaction

PROMPT = Prompt("a", [1, 2, 3], 1, 9)
WAITING = RequestFacts(0, 2, "waiting", (Segment(0, 2, "i0"),), last_attempt=7, last_instance="i0")
GROUP = GroupFacts("a", 1, 1, 3, 9, "a", state="active", started=True, requests=(WAITING,))


def recovered(tmp_path, *, group=GROUP, prompt=PROMPT, made=2, tool=None, run=True, **other):
    with closing(Store(tmp_path, durable="off")) as store:
        changes, transcript = Transaction(), TokenTranscript()
        if run:
            changes.put(facts.RUN, ONE, encoded(RunFacts(4.5, 3, serials=9)))
        if group is not None:
            changes.put(facts.GROUP, group.group, encoded(group))
        if prompt is not None:
            judged = other.get("judged", False)
            fact, tokens = facts.encoded_prompt(prompt, tool=tool, judged=judged)
            changes.put(facts.PROMPT, prompt.uid, fact)
            changes.append(facts.prompt_owner(prompt.uid), 0, tokens)
        for (kind, name), value in other.get("facts", {}).items():
            changes.put(kind, name, value)
        if made:
            transcript.append(1, made, Piece([5] * made, None))
            StoredTranscripts(store).write("a/0", transcript, changes)
        store.apply(changes)
    with closing(Store(tmp_path, durable="off")) as store:
        return recover(store, StoredTranscripts(store), other.get("given", ()))


def dropped(found, kind):
    return [
        name for (of, name), value in found.cleanup.facts.items() if (of, value) == (kind, None)
    ]


def restarted(found):
    return [owner.removeprefix("r:") for owner in found.cleanup.cleared]


def test_new_store_has_no_state(tmp_path):
    with closing(Store(tmp_path)) as store:
        found = recover(store, StoredTranscripts(store))
    assert not found.cleanup
    assert found.event is None


def test_intact_store_is_restored(tmp_path):
    found = recovered(
        tmp_path,
        facts={
            (facts.WEIGHTS, ONE): encoded(StoredWeights(3, b"how")),
            (facts.PAUSED, "i1"): b"",
            (facts.MODEL, ONE): b"m",
            (facts.LOST, ":f"): encoded(StoredLoss("why")),
        },
    )
    assert found.state.run == RunFacts(4.5, 3, serials=9)
    assert found.state.groups == (GROUP,)
    assert found.prompts == {"a": PROMPT}
    assert found.running == [("i0", 7)]
    assert found.weights == StoredWeights(3, b"how")
    assert found.paused == {"i1"}
    assert found.model == "m"
    assert found.lost == [LostGroup("f", "why")]


def test_a_group_that_lacks_tokens_starts_over(tmp_path):
    found = recovered(tmp_path, made=1)
    assert found.state.groups == (GROUP.as_submitted(),)
    assert restarted(found) == ["a/0"]


def test_group_with_damaged_unused_tokens_starts_over(tmp_path, monkeypatch):
    """What a tool has returned is damaged."""
    make = Store._load

    def load(store, **given):
        mark = make(store, **given)
        store.losses.owners = ["r:a/0"]
        return mark

    monkeypatch.setattr(Store, "_load", load)
    found = recovered(tmp_path)
    assert found.state.groups == (GROUP.as_submitted(),)
    assert restarted(found) == ["a/0"]


def test_a_group_without_its_prompt_fails(tmp_path):
    found = recovered(tmp_path, prompt=None)
    assert found.state.groups == ()
    assert dropped(found, facts.GROUP) == ["a"]
    (failed,) = found.lost
    assert "submit it again" in failed.reason


def test_prompt_with_only_its_tokens_left_fails(tmp_path):
    """Its two facts were damaged, and it was forgotten without a word."""
    fact, tokens = facts.encoded_prompt(msgspec.structs.replace(PROMPT, uid="b"), tool=None)
    with closing(Store(tmp_path, durable="off")) as store:
        changes = Transaction()
        changes.put(facts.PROMPT, "b", fact)
        changes.append(facts.prompt_owner("b"), 0, tokens)
        store.apply(changes)
    with closing(sqlite3.connect(tmp_path / "rows.sqlite")) as rows, rows:
        rows.execute("UPDATE facts SET crc = crc + 1 WHERE kind = ?", (facts.PROMPT,))
    found = recovered(tmp_path)
    assert found.state.groups == (GROUP,)
    assert [group.uid for group in found.lost] == dropped(found, facts.GROUP) == ["b"]


def test_a_trajectory_fails_unless_its_group_is_complete(tmp_path):
    assert "its tool was lost" in recovered(tmp_path / "1", tool="").lost[0].reason
    (failed,) = recovered(tmp_path / "3", tool="search", given=["other"]).lost
    assert "its tool 'search' was not passed again" in failed.reason
    finished = GroupFacts(
        "a", 1, 1, 3, 9, "a", state="complete", started=True, finished=(0,),
        requests=(RequestFacts(0, 2, "finished", (Segment(0, 2, "i0"),), finish="stop"),),
    )  # fmt: skip
    assert recovered(tmp_path / "2", tool="", group=finished).state.groups == (finished,)
    (failed,) = recovered(tmp_path / "4", tool="", group=finished, made=1).lost
    assert "its tool was lost" in failed.reason


def test_round_and_window_continue_without_a_group_that_lost_its_tool(tmp_path):
    written = {(facts.RUN, ONE): encoded(RunFacts(4.5, 3, round=Launch(2), window=1, lost=1))}
    assert recovered(tmp_path / "1", tool="", facts=written).state.run.lost == 2
    fresh = GROUP.as_submitted()
    run = recovered(tmp_path / "2", tool="", group=fresh, made=0, facts=written).state.run
    assert (run.lost, run.window) == (1, 0)


def test_a_trajectory_continues_when_its_tool_is_given_again(tmp_path):
    found = recovered(tmp_path, tool="search", given=["search"])
    assert found.state.groups == (GROUP,)
    assert found.tools == {"a": "search"}


def test_leases_belong_to_stored_or_reported_batches(tmp_path):
    delivered = Deliver(0, 3, ())
    leases = {
        "0": LeaseFacts("t1"),
        "1": LeaseFacts("t2"),
        "2": LeaseFacts("t2", ("t1",), acknowledged=True),
    }
    found = recovered(
        tmp_path,
        facts={
            (facts.DELIVERED, facts.delivery_name(delivered)): encoded(delivered),
            **{(facts.LEASE, name): encoded(lease) for name, lease in leases.items()},
        },
    )
    assert found.leases == {0: leases["0"], 2: leases["2"]}
    assert dropped(found, facts.LEASE) == ["1"]


def test_parts_whose_rows_are_damaged_are_without_samples(tmp_path):
    """A trainer names parts by their number, and a batch is over with its last."""
    here = [Deliver(4, 2, (), part=0, last=False), Deliver(4, 2, (), part=2, missing=1)]
    here += [Deliver(5, 3, (), part=1, last=False), Deliver(7, 3, ())]
    stored = {(facts.DELIVERED, facts.delivery_name(part)): encoded(part) for part in here}
    stored[facts.RUN, ONE] = encoded(RunFacts(4.5, 3, batches=6, parts=2))
    found = recovered(tmp_path, group=None, prompt=None, made=0, facts=stored)
    parts = [(part.batch, part.version, part.part, part.last) for part in found.deliveries]
    assert parts == [
        *((4, 2, 0, False), (4, 2, 1, False), (4, 2, 2, True)),
        *((5, 3, 0, False), (5, 3, 1, False), (5, 3, 2, True)),
        *((6, 3, 0, False), (6, 3, 1, False)),
        (7, 3, 0, True),
    ]


def test_failure_reported_in_a_lost_batch_is_reported_again(tmp_path):
    found = recovered(tmp_path, facts={(facts.LOST, "0:f"): encoded(StoredLoss("why", 0))})
    assert found.reported == {}
    assert dropped(found, facts.LOST) == ["0:f"]
    assert found.lost == [LostGroup("f", "why")]


def test_prompt_without_its_group_fails(tmp_path):
    found = recovered(tmp_path, group=None, made=0)
    (failed,) = found.lost
    assert failed.uid == "a"
    assert "submit it again" in failed.reason
    assert (dropped(found, facts.PROMPT), found.prompts) == (["a"], {})


def test_prompt_with_damaged_tokens_and_no_group_fails(tmp_path):
    fact, _ = facts.encoded_prompt(PROMPT, tool=None)
    stored = {(facts.PROMPT, "a"): fact}
    found = recovered(tmp_path, group=None, prompt=None, made=0, facts=stored)
    assert [group.uid for group in found.lost] == dropped(found, facts.PROMPT) == ["a"]


def test_number_of_a_batch_without_samples_is_restored(tmp_path):
    assert recovered(tmp_path / "1").last_report == -1
    found = recovered(tmp_path / "2", facts={(facts.LAST_REPORT, ONE): encoded(7)})
    assert found.last_report == 7


def test_without_its_counters_a_run_cannot_go_on(tmp_path):
    with pytest.raises(StoreError, match="submit its prompts again: a"):
        recovered(tmp_path, run=False)


def test_fact_of_another_shape_is_reported(tmp_path):
    with pytest.raises(StoreError, match="cannot be decoded"):
        recovered(tmp_path, facts={(facts.WEIGHTS, ONE): encoded([1, 2])})


WHOLE = RequestFacts(0, 2, "finished", (Segment(0, 2, "i0"),), finish="stop")
JUDGED = GroupFacts(
    "a",
    1,
    1,
    3,
    9,
    "a",
    state="complete",
    started=True,
    finished=(0,),
    requests=(WHOLE,),
    judged=True,
)


def test_rewards_come_with_their_samples(tmp_path):
    reward = Reward(0.5, {"answer": 0.5})
    found = recovered(tmp_path, group=JUDGED, facts={(facts.REWARD, "a/0"): encoded(reward)})
    assert found.rewards == {"a/0": reward}
    assert found.state.groups == (JUDGED,)


def test_rewards_of_a_group_that_fails_go_with_it(tmp_path):
    """Nobody holds them until the run ends."""
    reward = Reward(0.5, {"answer": 0.5})
    stored = {(facts.REWARD, "a/0"): encoded(reward)}
    found = recovered(tmp_path, group=JUDGED, prompt=None, facts=stored)
    assert [group.uid for group in found.lost] == ["a"]
    assert not found.rewards
    assert dropped(found, facts.REWARD) == ["a/0"]


def test_kept_group_with_a_lost_reward_is_judged_again(tmp_path):
    found = recovered(tmp_path, group=JUDGED)
    assert [group.state for group in found.state.groups] == ["judging"]


def test_delivered_sample_with_a_lost_reward_is_reported(tmp_path):
    """It would come again as one that was never to be rewarded."""
    segments = (Segment(0, 2, "i0"),)
    batch = Deliver(0, 3, (DeliveredSample("a/0", "a", 0, 3, 2, segments, 0, "stop"),))
    stored = {(facts.DELIVERED, facts.delivery_name(batch)): encoded(batch)}
    found = recovered(tmp_path / "1", group=None, judged=True, facts=stored)
    assert [delivery.samples for delivery in found.deliveries] == [()]
    assert [group.uid for group in found.reported[0]] == ["a"]
    assert (dropped(found, facts.GROUP), restarted(found)) == (["a"], ["a/0"])
    stored[facts.REWARD, "a/0"] = encoded(Reward(0.5))
    found = recovered(tmp_path / "2", group=None, judged=True, facts=stored)
    assert found.deliveries == [batch]
    assert not found.reported


def test_filtered_groups_are_reported_as_filtered(tmp_path):
    stored = {
        (facts.LOST, ":f"): encoded(StoredLoss(None)),
        (facts.LOST, "0:g"): encoded(StoredLoss(None, 0)),
    }
    found = recovered(tmp_path, facts=stored)
    assert found.lost == [LostGroup("f", None), LostGroup("g", None)]


#: Seconds of CPU that it may take to take a run up, and how many bytes this one has: enough to see
#: what grows faster than it should, few enough for a slow machine.
MAX_S, LIVE_BYTES = 2.0, 50 * 2**20


def test_a_large_run_is_taken_up_within_its_time_and_the_disk_is_bounded(tmp_path):
    tokens = 6400
    with closing(Store(tmp_path, durable="off")) as store:
        transcripts, number = StoredTranscripts(store), 0
        while store.live_bytes < LIVE_BYTES:
            changes = Transaction()
            changes.put(facts.RUN, ONE, encoded(RunFacts(4.5, 3, serials=number)))
            for _ in range(50):
                put_group(changes, transcripts, f"g{number}", tokens)
                number += 1
            store.apply(changes)
            store.tidy()
        for gone in set(range(number)) - set(range(0, number, 4)):
            changes = Transaction()
            transcripts.forget(f"g{gone}/0", changes)
            changes.drop(facts.GROUP, f"g{gone}")
            changes.drop(facts.PROMPT, f"g{gone}")
            changes.clear(facts.prompt_owner(f"g{gone}"))
            store.apply(changes)
            store.tidy()
        assert store.disk_bytes <= 2 * store.live_bytes + SPARE + 2 * LOG_PAGES * PAGE
    begun = time.process_time()
    with closing(Store(tmp_path, durable="off")) as store:
        found = recover(store, StoredTranscripts(store))
    assert time.process_time() - begun < MAX_S
    assert len(found.state.groups) == len(range(0, number, 4))
    assert not found.lost


def put_group(changes, transcripts, uid, tokens):
    fact, ids = facts.encoded_prompt(Prompt(uid, [1, 2, 3], 1, tokens), tool=None)
    changes.put(facts.PROMPT, uid, fact)
    changes.append(facts.prompt_owner(uid), 0, ids)
    request = RequestFacts(0, 2, "waiting", (Segment(0, tokens, "i0"),), last_attempt=1)
    group = GroupFacts(uid, 1, 1, 3, tokens, uid, state="active", requests=(request,))
    changes.put(facts.GROUP, uid, encoded(group))
    transcript = TokenTranscript()
    transcript.append(1, tokens, Piece([5] * tokens, [-0.5] * tokens))
    transcripts.write(f"{uid}/0", transcript, changes)


PROMPT_RESTORED_PAYLOADS = Prompt("a", [1, 2], 1, 9)


def make(prompt, index):
    return TokenPayload(prompt.prompt_ids, prompt.sampling_of(index))


def test_tokens_are_read_when_they_are_needed(tmp_path):
    with closing(Store(tmp_path, durable="off")) as store:
        transcript, stored, changes = TokenTranscript(), StoredTranscripts(store), Transaction()
        transcript.append(1, 2, Piece([5, 6], None))
        stored.write("a/0", transcript, changes)
        store.apply(changes)
        sample = DeliveredSample("a/0", "a", 0, 2, 2, (Segment(0, 2, "i0"),), 0, "stop")
        found = Recovered(
            RunState(groups=(GroupFacts("a", 1, 1, 2, 9),)),
            prompts={"a": PROMPT_RESTORED_PAYLOADS},
            deliveries=[Deliver(0, 0, (sample,))],
            reported={0: [FailedGroup("b", "why")]},
        )
        payloads = RestoredPayloads(found, stored, make)
        (batch,) = payloads.batches()
        assert batch.samples[0].response_ids == [5, 6]
        assert batch.failed == [FailedGroup("b", "why")]
        assert payloads.factories()["a"](0).response_ids == [5, 6]
        assert payloads.factories()["a"](1).response_ids == []


def test_newest_stored_part_names_the_failed_groups(tmp_path):
    """A trainer that starts anew gets a batch from its first part on, and parts that are made
    later do not tell it again."""
    parts = [Deliver(0, 0, (), part=0, last=False), Deliver(0, 0, (), part=1, last=False)]
    failed = FailedGroup("b", "why")
    with closing(Store(tmp_path, durable="off")) as store:
        found = Recovered(deliveries=parts, reported={0: [failed]})
        payloads = RestoredPayloads(found, StoredTranscripts(store), make)
        assert [batch.failed for batch in payloads.batches()] == [[], [failed]]
