"""Ids of requests: sample i of a group is `group/i`. A client names its own request, without a
slash."""

from __future__ import annotations


def request_id(group: str, index: int) -> str:
    return f"{group}/{index}"


def group_of(request: str) -> str:
    """The group of a request; empty for a client's own request."""
    return request.rpartition("/")[0]


def parse_request_id(request: str) -> tuple[str, int]:
    """The group and the index of a sample's request. Raises ValueError for another request."""
    group, _, index = request.rpartition("/")
    return group, int(index)


class IdCounter:
    """Numbers from 1, the order in which groups and requests came, which breaks ties. `last` is the
    last one given out; a restored run continues from it."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last
