"""When verl's trainer is to be given its next batch: read off TransferQueue, for it never asks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

#: Tags of the keys of one partition: a group's key is its uid, a sample's `{uid}_{session}_{i}`.
Tags = Mapping[str, Mapping[str, Any]]

_SETTLED = ("finished", "failure")


def asks_for_more(tags: Tags, given: Collection[str], groups: int) -> bool:
    """Whether the trainer has less than `groups` groups, those that it trains on included.

    given  groups that were delivered, and whose sessions may still be at work on their samples

    A step of verl's trainers takes so many; it clears their samples when its weights are out
    (`trainer_base.fit`), and then waits for the next. So that is when the next batch is asked for,
    and when what was taken away from the last one is made up for (what is stale, has failed, or
    teaches nothing).
    """
    held = {uid for uid in given if uid in tags}
    running = set()
    for key, tag in tags.items():
        if not tag.get("is_prompt"):
            continue
        if tag.get("status") in _SETTLED:
            held.add(key)
        else:
            running.add(key)
    for key, tag in tags.items():
        uid = key.split("_")[0]  # as verl's ReplayBuffer takes keys apart
        if not tag.get("is_prompt") and not tag.get("is_padding") and uid not in running:
            held.add(uid)  # taken by the trainer, which clears the group's own key
    return len(held) < groups


def still_given(tags: Tags, given: Collection[str]) -> set[str]:
    """Of the groups that were delivered, those that are not settled yet."""
    return {uid for uid in given if uid in tags and tags[uid].get("status") not in _SETTLED}
