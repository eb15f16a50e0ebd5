"""Links: between the scheduler and its fronts, and from the trainer to the instances."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.core.model.events import Event, InstancePaused
from rollout_sched.core.model.records import MAX_SIZE, Size
from rollout_sched.core.model.request_ids import group_of
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.traces.model import UNIX_S, Duration

# ------------------------------------------------------------------------------------------
# Fronts between the scheduler and the instances, each at the end of a link with a delay.
#
# This simulates `rollout_sched.link` in virtual time: answers reach the scheduler, and orders reach
# a front, with a delay and in order. The scheduler's own process supervises instances, so reports
# about them have no delay; a pause is over when all earlier answers of its instance have arrived.


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of fronts. A message takes `delay_s` seconds one way, on average; `spread` 0.5:
    between 50 % less and 50 % more. A front writes answers one after the other, `token_s` per
    token."""

    fronts: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)] = 1
    delay_s: Duration = 0.0
    spread: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    token_s: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class SimLinks:
    """A group with all of its requests belongs to one of the fronts."""

    def __init__(
        self, model: Links, seed: int, queue: EventQueue, tell: Callable[[Event], None]
    ) -> None:
        self._model = model
        self._queue = queue
        self._tell = tell
        self._rng = random.Random(f"links/{seed}")
        self._up = [0.0] * model.fronts  # when the last message sent so far arrives
        self._down = [0.0] * model.fronts
        self._written = [0.0] * model.fronts  # when a front has written the answers so far

    def tell(self, event: Event) -> None:
        """Report something that happened to an instance, or on one."""
        request = getattr(event, "request", None)
        if request is not None:
            written = self._write(_owner(request), getattr(event, "tokens", 0))
            self._queue.at(self._arrival(self._up, _owner(request), written), self._tell, event)
        elif isinstance(event, InstancePaused):
            self._queue.at(max(self._queue.now, *self._up), self._tell, event)
        else:
            self._tell(event)

    def down(self, carry_out: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps an order of the scheduler for a request: it reaches the front with a delay, in
        order."""

        def order(action: Any) -> None:
            arrival = self._arrival(self._down, _owner(action.request), self._queue.now)
            self._queue.at(arrival, carry_out, action)

        return order

    def acknowledged_at(self, request: str) -> float:
        """When its front knows, at the latest, what the scheduler made of the request's last
        answer."""
        model = self._model
        return self._up[self._front(_owner(request))] + model.delay_s * (1 + model.spread)

    def _write(self, owner: str, tokens: int) -> float:
        """When the answer is written."""
        front = self._front(owner)
        done = max(self._written[front], self._queue.now) + self._model.token_s * tokens
        self._written[front] = done
        return done

    def _arrival(self, lanes: list[float], owner: str, sent: float) -> float:
        front, model = self._front(owner), self._model
        takes_s = model.delay_s * (1 + model.spread * self._rng.uniform(-1, 1))
        lanes[front] = max(lanes[front], sent + takes_s)
        return lanes[front]

    def _front(self, owner: str) -> int:
        return zlib.crc32(owner.encode()) % self._model.fronts


def _owner(request: str) -> str:
    """The request's group, or the request itself if it has none."""
    return group_of(request) or request


# ------------------------------------------------------------------------------------------
# New weights on their way to the instances.

Positive = Annotated[float, msgspec.Meta(gt=0)]


class TransferCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New weights, and the way they take.

    fixed_s          in the instance, when it has all bytes
    bytes            of the weights
    bytes_per_s      from the trainer to each instance that is on no `NetworkLink`
    convert_s        from the end of the training step until the first byte can be sent
    plan             "star": the trainer sends to each instance. "chain", "tree": the instances send
                     on what they get, in buckets, each to one or two others, and the trainer to as
                     many; so all of a link are fed by one or two copies
    bucket_bytes     what an instance must have before it sends it on
    staged           the bytes go to the hosts' memory while the instances generate. The version is
                     published when all have them, and the trainer asks for its next batch then; an
                     update takes `fixed_s + bytes / h2d_bytes_per_s`
    h2d_bytes_per_s  from host memory into one instance, on all its GPUs

    Published pauses: 3.5-4 s for a 106B model on 8 H800 to 16 s for a 1T model on 256 H20
    (checkpoint-engine with vLLM 0.10); 1-4 s for 7B-32B on one node. Chains in buckets are
    checkpoint-engine's; transfers into host memory beside generation are those of AsyncFlow (arXiv
    2507.01663) and of Laminar's relays (arXiv 2510.12633).
    """

    fixed_s: Duration = 1.0
    bytes: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    bytes_per_s: Positive = 10e9
    convert_s: Duration = 0.0
    plan: Literal["star", "chain", "tree"] = "star"
    bucket_bytes: Positive = 1e9
    staged: bool = False
    h2d_bytes_per_s: Positive = 50e9

    def __post_init__(self) -> None:
        for seconds in (self.seconds, self.from_host_s):
            if not seconds < UNIX_S:
                raise ValueError(f"an update takes {seconds:g} s; lower bytes or fixed_s")

    @property
    def seconds(self) -> float:
        """Of one instance that has a path of its own."""
        return self.fixed_s + self.bytes / self.bytes_per_s

    @property
    def from_host_s(self) -> float:
        """Of one instance whose host has the weights."""
        return self.fixed_s + self.bytes / self.h2d_bytes_per_s


class NetworkLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network on which new weights travel.

    bytes_per_s  of the trainer, and of each instance that sends them on
    shared       what the trainer sends to several instances at once shares that rate equally;
                 false: each gets all of it
    instances    their numbers; none: all
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    bytes_per_s: Positive
    shared: bool = True
    instances: tuple[Size, ...] = ()


class SimLink:
    """One link in virtual time. A transfer that has begun takes its time even if its instance is
    lost.

    sent_bytes  by the trainer
    """

    def __init__(self, cost: TransferCost, link: NetworkLink, queue: EventQueue) -> None:
        self.sent_bytes = 0.0
        self._cost = cost
        self._rate = link.bytes_per_s
        self._shares = link.shared and cost.plan == "star"
        self._queue = queue
        self._version = 0
        self._arrivals: list[float] = []  # of this version, in the order of their beginnings
        self._sharing = deque[tuple[float, float, Callable[[Any], None], Any]]()
        self._served = 0.0  # bytes that each of them would have got if it had been here all along
        self._since = 0.0
        self._due = 0.0

    def send(self, version: int, rest_s: float, done: Callable[[Any], None], argument: Any) -> None:
        """Send the weights to one more instance; it has them `rest_s` after all bytes."""
        if self._shares:
            self._settle()
            self.sent_bytes += self._cost.bytes
            self._sharing.append((self._served + self._cost.bytes, rest_s, done, argument))
            self._plan()
        else:
            self._queue.after(rest_s + self._takes_s(version), done, argument)

    def _takes_s(self, version: int) -> float:
        """Until the next instance has all bytes. The sender of the k-th is the trainer (0) or an
        earlier one; in a tree, which is a heap with the trainer as its root, it has two
        receivers."""
        cost, now = self._cost, self._queue.now
        if version != self._version:
            self._version, self._arrivals = version, []
        number = len(self._arrivals) + 1
        sender = {"star": 0, "chain": number - 1, "tree": (number + 1) // 2 - 1}[cost.plan]
        rate = self._rate / 2 if cost.plan == "tree" else self._rate
        takes_s = cost.bytes / rate
        if sender:
            last_bucket_s = min(cost.bucket_bytes, cost.bytes) / rate
            takes_s = max(takes_s, self._arrivals[sender - 1] + last_bucket_s - now)
        else:
            self.sent_bytes += cost.bytes
        self._arrivals.append(now + takes_s)
        return takes_s

    def _settle(self) -> None:
        """All transfers have got the same since the last change."""
        now = self._queue.now
        if self._sharing:
            self._served += (now - self._since) * self._rate / len(self._sharing)
        else:
            self._served = 0.0
        self._since = now

    def _plan(self) -> None:
        """The first is done next; plans made before are void."""
        left = max(0.0, self._sharing[0][0] - self._served)
        self._due = self._queue.now + left * len(self._sharing) / self._rate
        self._queue.at(self._due, self._first_done, self._due)

    def _first_done(self, due: float) -> None:
        if due != self._due or not self._sharing:
            return
        self._settle()
        self._served = self._sharing[0][0]
        while self._sharing and self._sharing[0][0] <= self._served:
            _, rest_s, done, argument = self._sharing.popleft()
            self._queue.after(rest_s, done, argument)
        if self._sharing:
            self._plan()


class SimWeights:
    """Takes new weights from the trainer to the instances, by the scenario's plan.

    nodes   the instances in the fleet, by name
    names   of all instances, by number
    """

    def __init__(
        self,
        cost: TransferCost,
        network: Sequence[NetworkLink],
        names: Sequence[str],
        nodes: Collection[str],
        queue: EventQueue,
    ) -> None:
        self._cost = cost
        self._nodes = nodes
        self._queue = queue
        own = SimLink(cost, NetworkLink("own", cost.bytes_per_s, shared=False), queue)
        self._links = dict.fromkeys(names, own)
        self._named: dict[str, SimLink] = {}
        for link in network:
            self._named[link.name] = sim = SimLink(cost, link, queue)
            on = [names[number] for number in link.instances] or names
            self._links.update(dict.fromkeys(on, sim))
        self._ready_at = 0.0  # when the newest version can be sent
        self._staged: dict[str, int] = {}
        self._to_stage: set[str] = set()

    @property
    def sent_bytes(self) -> dict[str, float]:
        """What the trainer has sent, by the link's name."""
        return {name: link.sent_bytes for name, link in self._named.items()}

    def publish(self, version: int, published: Callable[[int], None]) -> None:
        """The trainer has a new version; `published` is called when the scheduler may know it."""
        self._ready_at = self._queue.now + self._cost.convert_s
        if self._cost.staged:
            self._queue.at(self._ready_at, self._stage, (version, published))
        else:
            published(version)

    def load(
        self, instance: str, version: int, loaded: Callable[[Any], None], argument: Any
    ) -> None:
        """Load the version into an instance; `loaded` is called when that is done."""
        cost, queue = self._cost, self._queue
        if self._staged.get(instance) == version:
            queue.after(cost.from_host_s, loaded, argument)
            return
        rest_s = cost.from_host_s if cost.staged else cost.fixed_s
        order = (instance, version, rest_s, loaded, argument)
        if self._ready_at > queue.now:
            queue.at(self._ready_at, self._send, order)
        else:
            self._send(order)

    def _send(self, order: tuple[str, int, float, Callable[[Any], None], Any]) -> None:
        instance, version, rest_s, loaded, argument = order
        self._links[instance].send(version, rest_s, loaded, argument)

    def _stage(self, what: tuple[int, Callable[[int], None]]) -> None:
        version, published = what
        here = list(self._nodes)
        self._to_stage = set(here)
        for instance in here:
            self._links[instance].send(version, 0.0, self._in_host, (instance, version, published))
        if not here:
            published(version)

    def _in_host(self, arrived: tuple[str, int, Callable[[int], None]]) -> None:
        instance, version, published = arrived
        self._staged[instance] = version
        self._to_stage.discard(instance)
        if not self._to_stage:
            published(version)
