"""What is in an open store."""

from __future__ import annotations

from typing import NamedTuple

from rollout_sched.store.store import Store


class Row(NamedTuple):
    kind: str
    name: str
    value: bytes


def facts_in(store: Store) -> list[Row]:
    return [Row(*row) for row in store._reader.execute("SELECT kind, name, value FROM facts")]
