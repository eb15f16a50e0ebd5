"""Decides from TransferQueue when verl's trainer needs its next batch: the trainer never asks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

#: Tags of the keys of one partition: a group's key is its uid, a sample's `{uid}_{session}_{i}`.
Tags = Mapping[str, Mapping[str, Any]]

_SETTLED = ("finished", "failure")


def asks_for_more(tags: Tags, given: Collection[str], groups: int) -> bool:
    """Whether the trainer has fewer than `groups` groups, including those that it trains on now.

    given  groups that were delivered, whose sessions may still process their samples

    A step of verl's trainers takes `groups` groups. The trainer clears their samples after it has
    published its weights (`trainer_base.fit`), and then waits for the next ones. At this moment the
    next batch is requested, and the groups that the last one lost (stale, failed, or without a
    training signal) are replaced.
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
        uid = key.split("_")[0]  # as verl's ReplayBuffer splits keys
        if not tag.get("is_prompt") and not tag.get("is_padding") and uid not in running:
            held.add(uid)  # taken by the trainer, which has cleared the group's own key
    return len(held) < groups


def still_given(tags: Tags, given: Collection[str]) -> set[str]:
    """The delivered groups that are not yet finished or failed in TransferQueue."""
    return {uid for uid in given if uid in tags and tags[uid].get("status") not in _SETTLED}
