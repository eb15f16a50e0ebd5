"""Assigns the ranks of a weight-transfer group to the workers of each server.

A trainer that sees one server sends it the first of its ranks and the size of the group: in vLLM
0.32 `rank_offset` and `world_size` of the NCCL backends
(`distributed/weight_transfer/nccl_common.py`), where a worker's rank is the offset plus its own.
With the same values, every server of a fleet would take the same ranks, and NCCL would wait forever
for the others. So each server gets its own ranks, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.core.errors import CallerError

#: The largest rank number that is accepted.
MOST_RANKS = 2**20


class RankFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a call that give a server's ranks.

    within  the field that contains the other two; "" if they are at the top level
    first   the field of the first rank: all below it are the trainer's, or not counted
    world   the field of the size of the group, as far as it is counted
    """

    first: str
    world: str
    within: str = ""


#: The fields of vLLM's own init_info.
VLLM = RankFields("rank_offset", "world_size")


def deal(
    info: Mapping[str, Any], fields: RankFields, world_sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """`info` for each server, with its own first rank and the size of the group; `world_sizes` has
    the number of workers of each server. Unchanged if it has no rank, as for backends without.

    Raises CallerError if `info` gives another group size: the group would wait for ranks that never
    come, or have some twice.
    """
    if fields.within:
        inner = info.get(fields.within)
        if not isinstance(inner, Mapping):
            return [dict(info)] * len(world_sizes)
        flat = RankFields(fields.first, fields.world)
        return [{**info, fields.within: dealt} for dealt in deal(inner, flat, world_sizes)]
    if fields.first not in info:
        return [dict(info)] * len(world_sizes)
    first = _number(fields.first, info[fields.first])
    world = first + sum(world_sizes)
    told = info.get(fields.world)
    if told is not None and _number(fields.world, told) != world:
        raise CallerError(
            f"{fields.world} is {told} with {fields.first} {first}, but the present instances have "
            f"{sum(world_sizes)} ranks, so it must be {world}: call GET /get_world_size just "
            "before you set up the group"
        )
    dealt = []
    for size in world_sizes:
        dealt.append({**info, fields.first: first, fields.world: world})
        first += size
    return dealt


def _number(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_RANKS:
        raise CallerError(f"{field} must be a number from 0 to {MOST_RANKS}")
    return value
