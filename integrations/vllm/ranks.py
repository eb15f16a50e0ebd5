"""Which ranks of a weight-transfer group each server's workers are.

A trainer that sees one server tells it the first of its ranks and the size of the group: in vLLM
0.32 `rank_offset` and `world_size` of the NCCL backends
(`distributed/weight_transfer/nccl_common.py`), where a worker's rank is the offset plus its own.
Told the same, every server of a fleet would take the same ranks, and NCCL would wait for ever for
the others. So each is dealt its own, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.core.errors import CallerError

#: Ranks beyond this are nobody's.
MOST_RANKS = 2**20


class RankFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a call says which ranks a server has.

    within  the field that holds the two; "" if they stand at the top
    first   the field of the first rank: all below it are the trainer's, or not counted
    world   the field of the size of the group, as far as it is counted
    """

    first: str
    world: str
    within: str = ""


#: Of vLLM's own init_info.
VLLM = RankFields("rank_offset", "world_size")


def deal(
    info: Mapping[str, Any], fields: RankFields, world_sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """`info` for each server, with its own first rank and the size of the group; `world_sizes` has
    the servers' numbers of workers. As it is where it names no rank, as for backends without.

    Raises CallerError where the group is said to have another size: it would wait for ranks that
    never come, or find some twice.
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
            f"{fields.world} is {told} with {fields.first} {first}, but the instances that are "
            f"here have {sum(world_sizes)} ranks, so it must be {world}: ask GET /get_world_size "
            "just before the group is set up"
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
