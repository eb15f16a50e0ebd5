"""The requests that may be dispatched: a queue for each client, fair between clients."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, Final

from rollout_sched.core.model.model import Attempt, Group, Request
from rollout_sched.core.model.records import ONE_IN
from rollout_sched.core.state.lifecycle import INTERRUPTING, PARKED

#: (key, serial, request). Typed as a tuple, the compiler would copy it, and it loses its identity.
Entry = Any


class WaitingQueue:
    """Requests by (ordering key, serial): O(log n) to add and to move, O(1) to remove.

    A launch adds thousands of requests: those are sorted together and taken from the end of a list.
    A single new request, or one with a new key, goes to a heap beside it. Neither is searched: an
    entry is valid while it is its request's `rank`, and is dropped at the front if it is not.

    A request that fits no open instance is set aside, so that it does not block others.

    size  number of waiting requests, including those set aside
    """

    def __init__(self) -> None:
        self.size = 0
        self._sorted: list[Entry] = []  # lowest key last
        self._heap: list[Entry] = []
        self._new: list[Entry] = []  # entries since the last look
        self._aside: dict[str, Request] = {}

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Request]:
        self._sort_all()
        return iter([entry[2] for entry in reversed(self._sorted)] + self.aside)

    def __contains__(self, request: Request) -> bool:
        return request.rank is not None

    def first(self) -> Request | None:
        """The request that goes next; None if none waits except those set aside."""
        if self._new:
            self._sort_in()
        entries, heap = self._sorted, self._heap
        while entries and entries[-1][2].rank is not entries[-1]:
            entries.pop()
        while heap and heap[0][2].rank is not heap[0]:
            heappop(heap)
        if heap and not (entries and entries[-1] < heap[0]):
            first: Request = heap[0][2]
            return first
        return entries[-1][2] if entries else None

    @property
    def aside(self) -> list[Request]:
        return list(self._aside.values())

    def set_aside(self, request: Request) -> None:
        """Skip a waiting request until `recall`."""
        assert request.rank is not None, "only waiting requests can be set aside"
        request.rank = (request.rank[0], request.serial, request)
        self._aside[request.id] = request

    def recall(self) -> None:
        """Requests that were set aside wait in their places again."""
        if self._aside:
            self._new.extend([request.rank for request in self._aside.values()])
            self._aside.clear()

    def add(self, request: Request, key: Any) -> None:
        entry: Entry = (key, request.serial, request)
        request.rank = entry
        self._new.append(entry)
        self.size += 1

    def remove(self, request: Request) -> None:
        request.rank = None
        self.size -= 1
        if self._aside:
            self._aside.pop(request.id, None)
        if not self.size:  # no entry is valid: keep no requests that have ended
            self._sorted.clear()
            self._heap.clear()
            self._new.clear()

    def rerank(self, request: Request, key: Any) -> None:
        """Move a request whose key has changed."""
        assert request.rank is not None, "only waiting requests can move"
        if key == request.rank[0]:
            return
        entry: Entry = (key, request.serial, request)
        request.rank = entry
        if request.id not in self._aside:
            self._new.append(entry)

    def rebuild(self) -> None:
        """Keys have a new type, which cannot be compared with that of invalid entries."""
        self._sort_all()

    # -- inside ----------------------------------------------------------------------------

    def _sort_in(self) -> None:
        """Merge new entries; sort all if many are new or too many entries are invalid."""
        new, entries = self._new, len(self._sorted) + len(self._heap)
        if 4 * len(new) > entries or entries > 64 + 4 * self.size:
            self._sort_all()
            return
        for entry in new:
            heappush(self._heap, entry)
        new.clear()

    def _sort_all(self) -> None:
        entries = [*self._sorted, *self._heap, *self._new]
        self._sorted = [entry for entry in entries if entry[2].rank is entry]
        self._sorted.sort(reverse=True)
        self._heap.clear()
        self._new.clear()


# ------------------------------------------------------------------------------------------
# Fair queueing between clients, and between all of them and the trainer.
#
# Each client has a queue of its own, and the client goes next that got the fewest tokens: the
# virtual token counter of Sheng et al. (Fairness in Serving LLMs, OSDI 2024), which is deficit
# round robin with a quantum of one request. A request counts with its context and the response that
# is expected of it, and with what it really made when its attempt ends. Whoever comes back after a
# silence begins where the others are: silence earns no credit.
#
# A flood of long requests would hold all slots and fill the KV caches, so beside other clients a
# client leaves some of both free for whoever holds less, and clients get few slots while the
# trainer has any: one in `ONE_IN`. As many clients that have nothing in flight do not wait until
# the trainer has had its part. Whoever waits, holds less than an equal part of the slots, and got
# fewer tokens than the client that holds most, counting what its requests may still make, takes
# slots from it: its newest requests are interrupted (`Dispatcher.make_room`). So it is when others
# come to one that was alone.

#: The trainer's part of all tokens while its requests and those of clients wait.
TRAINER_SHARE: Final = 0.96875  # 31 of 32

#: Seconds for which a client counts as being beside others after it was seen to be.
BESIDE_S: Final = 60.0

#: Seconds for which the trainer counts as busy after its last request: a batch that follows at once
#: does not find all slots taken.
LINGER_S: Final = 1.0

#: Most clients with a queue of their own at one time; those that come after them share one.
MOST_CLIENTS: Final = 256
THE_REST = "clients without a queue of their own"


class Flow:
    """The requests of the trainer or of one client.

    served     tokens that it got, divided by its share
    in_flight  its attempts on instances
    promised   of a client: tokens that these may make
    expected   of a client: tokens that these, and those that yield, are expected to make
    ended      how many have ended by themselves
    size       tokens of one of them, context and response, as the last that ended were; as is
               expected before one has
    held       its first request cannot go at present
    """

    __slots__ = ("ended", "expected", "held", "in_flight", "promised", "queue", "served", "size")

    def __init__(self, served: float = 0.0) -> None:
        self.queue = WaitingQueue()
        self.served = served
        self.in_flight = self.promised = self.expected = self.ended = 0
        self.size = 0.0
        self.held = False

    @property
    def claimed(self) -> float:
        """What it got, and may get without asking again."""
        return self.served + self.promised

    @property
    def held_tokens(self) -> float:
        """About what its attempts take of the KV caches in the end."""
        return self.in_flight * self.size

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.queue.size or self.in_flight)


class Part:
    """What a client may take from others: up to so many `slots`, and while its claim is below that
    of the one that holds most, `ahead`."""

    __slots__ = ("ahead", "slots")

    def __init__(self, slots: int, ahead: float) -> None:
        self.slots = slots
        self.ahead = ahead


class Shares:
    """What the trainer and each client got, and what they may still have.

    slots      how many requests the fleet can run at once
    kv_tokens  how many tokens its KV caches hold
    trainer    the trainer's flow
    clients    those of clients, by name
    crowded    a client has come beside one that was alone, which still holds too much
    contended  a client has asked while few slots were free
    yielding   attempts that are interrupted for others: no client holds them any longer
    """

    def __init__(self) -> None:
        self.slots = self.kv_tokens = 0
        self.trainer = Flow()
        self.clients: dict[str, Flow] = {}
        self._together = Flow()  # what all clients got and have in flight; its queue is empty
        self._virtual_time = 0.0  # what those got that are served now: newcomers begin there
        self.crowded = self.contended = False
        self.yielding: set[int] = set()
        self._beside_until = self._trainer_until = 0.0
        self._now = 0.0

    def flows(self) -> list[Flow]:
        return [self.trainer, *self.clients.values()]

    def flow(self, client: str) -> Flow:
        if not client:
            return self.trainer
        flow = self.clients.get(client)
        if flow is None:
            flow = self.clients[client] = Flow(self._least_served())
        return flow

    # -- what each got ---------------------------------------------------------------------

    def admit(self, client: str, now: float) -> str:
        """A client's request has come; returns the name under which it counts."""
        if not client:
            return client
        if client not in self.clients:
            self._forget_idle()
            if len(self.clients) >= MOST_CLIENTS:
                client = THE_REST
        own = self.flow(client)
        if any(flow.busy for flow in self.clients.values() if flow is not own):
            self.crowded |= not self.beside(now)
            self._beside_until = now + BESIDE_S
            self.contended |= self._free <= self._kept
        return client

    def catch_up(self, flow: Flow) -> None:
        """Nothing of it waited until now."""
        trainer, together = self.trainer, self._together
        if flow is trainer:
            trainer.served = max(trainer.served, together.served)
            return
        flow.served = max(flow.served, self._least_served(flow))
        if not any(other.queue.size for other in self.clients.values()):
            together.served = max(together.served, trainer.served)

    def began(self, attempt: Attempt) -> None:
        """It is charged with its context and the response that is expected. A client's is charged
        with its prompt once, however often it yields."""
        client, tokens = attempt.request.client, attempt.context_tokens + attempt.expected_tokens
        if not client or not attempt.request.last_attempt:
            self.charge(client, attempt.context_tokens)
        self.expect(client, attempt.expected_tokens)
        flow = self._count(attempt, 1)
        if not flow.ended:
            flow.size = max(flow.size, float(tokens))

    def yields(self, attempt: Attempt) -> None:
        """It is interrupted for others."""
        self.yielding.add(attempt.id)
        self._count(attempt, -1)

    def ended(self, attempt: Attempt) -> None:
        """Its client pays for what it made, not for what was expected."""
        client = attempt.request.client
        self.expect(client, -attempt.expected_tokens)
        self.charge(client, attempt.tokens)
        if self.yielding and attempt.id in self.yielding:
            self.yielding.remove(attempt.id)
            return
        flow = self._count(attempt, -1)
        if attempt.request.state is not INTERRUPTING:  # else it says nothing of others
            flow.ended += 1
            made = attempt.context_tokens + attempt.tokens
            flow.size += (made - flow.size) / min(flow.ended, 8)

    def _count(self, attempt: Attempt, more: int) -> Flow:
        flow = self.flow(attempt.request.client)
        flow.in_flight += more
        if flow is not self.trainer:
            flow.promised += more * attempt.max_new_tokens
            self._together.in_flight += more
        return flow

    def expect(self, client: str, tokens: int) -> None:
        """So many more tokens are expected of an attempt; less than 0: fewer."""
        self.charge(client, tokens)
        if client:
            self.flow(client).expected += tokens

    def charge(self, client: str, tokens: int) -> None:
        """So many more tokens; less than 0: fewer than were expected."""
        if not client:
            self.trainer.served += tokens / TRAINER_SHARE
        else:
            self.flow(client).served += tokens
            self._together.served += tokens / (1 - TRAINER_SHARE)

    # -- what each may have ----------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Requests are about to be dispatched."""
        self._now = now
        if self.trainer.busy:
            self._trainer_until = now + LINGER_S

    def beside(self, now: float) -> bool:
        """Whether several clients came within a minute."""
        return now < self._beside_until

    @property
    def in_flight(self) -> int:
        """Attempts of clients."""
        return self._together.in_flight

    def owed(self) -> tuple[int, float]:
        """How many slots more clients hold than they may have, or than leave an equal part to those
        that wait; and how many tokens more a client that was alone until now."""
        free, part, tokens = self._free, self.part(), 0.0
        wanted = 0
        for flow in self.clients.values():
            if flow.claimed < part.ahead:
                wanted += max(0, min(flow.queue.size, part.slots - flow.in_flight))
        if self.crowded or (free < 0 and self.beside(self._now)):
            wanted = max(wanted, self._kept)
        if self.crowded:
            most = max(self.clients.values(), key=lambda flow: flow.held_tokens)
            tokens = min(self.kv_tokens // ONE_IN - self.room(), most.held_tokens - most.size)
        return wanted - free, tokens

    def part(self) -> Part:
        """The equal part of each client."""
        busy = sum([flow.busy for flow in self.clients.values()])
        clients = self.clients.values()
        most = max(clients, key=lambda flow: flow.in_flight, default=self.trainer)
        return Part(max(1, self._client_slots // max(1, busy)), most.claimed)

    @property
    def clients_behind(self) -> bool:
        """Whether clients got less than their part."""
        return self._together.served < self.trainer.served

    @property
    def idle_client_may_go(self) -> bool:
        """Whether a client with nothing in flight goes before the trainer: it does not pay for what
        other clients got."""
        running = sum([bool(flow.in_flight) for flow in self.clients.values()])
        return running < self.slots // ONE_IN

    def advance_virtual_time(self, flow: Flow) -> None:
        """It got the least of all clients whose requests wait."""
        self._virtual_time = max(self._virtual_time, flow.served)

    def room(self) -> float:
        """Tokens that the KV caches hold beside what clients have in flight."""
        room = float(self.kv_tokens)
        for flow in self.clients.values():  # the compiler takes `sum` for one of integers
            room -= flow.held_tokens
        return room

    def may_go(self, flow: Flow, part: Part, room: float) -> bool:
        """Whether the client may have one attempt more, with `part()` and `room()`."""
        free = self._free
        if free <= 0 or not self.beside(self._now):
            return free > 0
        behind = flow.in_flight < part.slots and flow.claimed < part.ahead
        if free <= self._kept and flow.in_flight >= free and not behind:
            return False
        return not flow.in_flight or room > min(self.kv_tokens // ONE_IN, flow.held_tokens)

    # -- inside ----------------------------------------------------------------------------

    def _least_served(self, but: Flow | None = None) -> float:
        """Where whoever comes now begins: without what is only expected of others, who may yield
        and never make it."""
        others = [flow for flow in self.clients.values() if flow.busy and flow is not but]
        busy = [flow.served - flow.expected for flow in others]
        return min(busy, default=self._virtual_time)

    def _forget_idle(self) -> None:
        """An idle client that got more than the others is remembered until they have as much."""
        for client, flow in list(self.clients.items()):
            if flow.served <= self._virtual_time and not flow.busy:
                del self.clients[client]

    @property
    def _client_slots(self) -> int:
        """Slots that clients may have together: every further sequence of a batch slows the others
        down, so beside the trainer they get few."""
        works = self.trainer.busy or self._now < self._trainer_until
        return max(1, self.slots // ONE_IN) if works else self.slots

    @property
    def _free(self) -> int:
        """Of these, those that clients do not hold; below 0 if they hold more."""
        return self._client_slots - self._together.in_flight

    @property
    def _kept(self) -> int:
        """How many of these are for whoever holds less than is free."""
        slots = self._client_slots
        return max(slots // ONE_IN, int(slots > 1 and self.slots >= ONE_IN))


class FairQueue:
    """All waiting requests: the shares decide whose goes next; within a client the ordering does,
    and priorities.

    size  number of waiting requests, including those set aside
    """

    def __init__(self, shares: Shares) -> None:
        self.size = 0
        self._shares = shares
        self._stopped: list[Flow] = []  # those with requests set aside or held

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Request]:
        for flow in self._shares.flows():
            yield from flow.queue

    def __contains__(self, request: Request) -> bool:
        return request.rank is not None

    def first(self) -> Request | None:
        """The request that goes next; None if none may go."""
        shares = self._shares
        ours = None if shares.trainer.held else shares.trainer.queue.first()
        if not shares.clients:
            return ours
        if ours is None or shares.clients_behind:
            return self._client_first(idle=False) or ours
        return (self._client_first(idle=True) if shares.idle_client_may_go else None) or ours

    def _client_first(self, *, idle: bool) -> Request | None:
        """The first request of the client that got the least; `idle`: of those that have none in
        flight."""
        shares = self._shares
        best, request, part, room = None, None, shares.part(), shares.room()
        for flow in shares.clients.values():
            if flow.held or not flow.queue.size or (idle and flow.in_flight):
                continue
            if (best is None or flow.served < best.served) and shares.may_go(flow, part, room):
                first = flow.queue.first()
                if first is not None:
                    best, request = flow, first
        if best is not None:
            shares.advance_virtual_time(best)
        return request

    def each_first(self) -> Iterator[Request]:
        """The first request of everybody who may have another one in flight."""
        shares = self._shares
        part, room = shares.part(), shares.room()
        for flow in shares.flows():
            first = flow.queue.first()
            if first is not None and (flow is shares.trainer or shares.may_go(flow, part, room)):
                yield first

    def hold(self, request: Request) -> None:
        """It is first and cannot go: nor can those behind it, until `recall`."""
        flow = self._shares.flow(request.client)
        flow.held = True
        self._stopped.append(flow)

    def set_aside(self, request: Request) -> None:
        """Skip a waiting request until `recall`."""
        flow = self._shares.flow(request.client)
        flow.queue.set_aside(request)
        self._stopped.append(flow)

    @property
    def aside(self) -> list[Request]:
        return [request for flow in self._shares.flows() for request in flow.queue.aside]

    def recall(self) -> None:
        """Requests that were set aside or held wait in their places again."""
        for flow in self._stopped:
            flow.held = False
            flow.queue.recall()
        self._stopped.clear()

    def add(self, request: Request, key: Any) -> None:
        flow = self._shares.flow(request.client)
        if not flow.queue.size:
            self._shares.catch_up(flow)
        flow.queue.add(request, key)
        self.size += 1

    def remove(self, request: Request) -> None:
        self._shares.flow(request.client).queue.remove(request)
        self.size -= 1

    def rerank(self, request: Request, key: Any) -> None:
        """Move a request whose key has changed."""
        self._shares.flow(request.client).queue.rerank(request, key)

    def rebuild(self) -> None:
        """Keys have a new type, which cannot be compared with that of invalid entries."""
        for flow in self._shares.flows():
            flow.queue.rebuild()


class ReplayBuffer:
    """Parked requests in the order they came; they leave group by group (Kimi k1.5, 2.6.2)."""

    def __init__(self) -> None:
        self._parked: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._parked.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self._parked

    def add(self, request: Request) -> None:
        self._parked[request.id] = request

    def remove(self, request: Request) -> None:
        del self._parked[request.id]

    def discard(self, request: Request) -> None:
        """Remove the request if the buffer has it."""
        self._parked.pop(request.id, None)

    def parked_of(self, group: Group) -> list[Request]:
        """The parked requests of one group."""
        return [r for r in group.requests if r.state is PARKED]
