"""In-memory TCP between simulated processes on hosts, in virtual time, with delays, resets and cut
links.

Data arrives in order or not at all, as with TCP. A cut link holds packets back until its repair.
The first packet to the host of a dead process resets the connection. Each connection has its own
random generator, so connections do not affect each other.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.simulation.kernel import Kernel, Process

#: Bytes that the system accepts from a writer before the reader has read any.
SYSTEM_BUFFER = 2**18

#: Bytes buffered beyond that at which a writer is paused, and below which it is resumed.
HIGH_WATER, LOW_WATER = 2**16, 2**14

#: Seconds between two attempts of a system to connect.
SYN_S = 1.0

#: First port for listeners that do not request one.
EPHEMERAL = 40_000

Address = tuple[str, int]
Link = frozenset[str]


class Network:
    """`latency_s`: the least latency of a packet; some packets take several times as long."""

    def __init__(self, kernel: Kernel, seed: int, latency_s: float) -> None:
        self.kernel = kernel
        self.latency_s = latency_s
        self._breaking: dict[Link, float] = {}
        self._seed = seed
        self._listeners: dict[Address, Listener] = {}
        self._made: Counter[tuple[str, str]] = Counter()
        self._ports: Counter[str] = Counter()
        self._ends: dict[End, None] = {}
        self._cut: set[Link] = set()
        self._vanished: set[str] = set()
        self._reached: dict[Any, Listener] = {}
        self._quiet = os.eventfd(0)  # a descriptor that is never readable

    def close(self) -> None:
        os.close(self._quiet)
        self._ends.clear()
        self._listeners.clear()
        self._reached.clear()

    # -- faults ----------------------------------------------------------------------------

    def cut(self, one: str, other: str) -> None:
        """Cut the link between two hosts until `mend`."""
        self._cut.add(frozenset((one, other)))

    def mend(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))
        self._flush_all()

    def reset(self, one: str, other: str) -> None:
        """Break every connection between two hosts."""
        for end in tuple(self._ends):
            if end.link == {one, other} and end.process.host == one:
                end.break_off()

    def break_new(self, one: str, other: str, share: float) -> None:
        """Let this share of new connections break after a few packets."""
        self._breaking[frozenset((one, other))] = share

    def gone(self, process: Process, *, silently: bool) -> None:
        """A process has died: its system resets connections, or its whole machine is silent until
        `back`."""
        for address, listener in tuple(self._listeners.items()):
            if listener.process is process:
                del self._listeners[address]
        if silently:
            self._vanished.add(process.host)
        for end in tuple(self._ends):
            if end.process is process:
                end.die(silently=silently)

    def back(self, host: str) -> None:
        """A machine is up again."""
        self._vanished.discard(host)
        self._flush_all()

    def _flush_all(self) -> None:
        for end in tuple(self._ends):
            end.flush()

    # -- calls of programs -----------------------------------------------------------------

    def listen(self, process: Process, factory: Any, host: str, port: int) -> Listener:
        if not port:
            port = self._port(host)
        if (host, port) in self._listeners:
            raise OSError(98, f"{host}:{port} is taken")
        listener = Listener(self, process, factory, (host, port))
        self._listeners[host, port] = listener
        return listener

    def unlisten(self, listener: Listener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    async def reach(self, process: Process, sock: Any, address: Address) -> None:
        """Wait until the server's system has accepted the connection."""
        host, port = address
        while not self.passes(process.host, host):
            await asyncio.sleep(SYN_S)
        await asyncio.sleep(2 * self.latency_s)
        listener = self._listeners.get((host, port))
        if listener is None:
            raise ConnectionRefusedError(111, f"nobody listens at {host}:{port}")
        self._reached[sock] = listener

    async def connect(
        self, process: Process, factory: Any, host: Any, port: Any, sock: Any
    ) -> tuple[End, Any]:
        key = sock if sock is not None else object()
        if sock is None:
            await self.reach(process, key, (host, port))
        listener = self._reached.pop(key)
        here, there = process.host, listener.process.host
        self._made[here, there] += 1
        name = f"{here}-{there}-{self._made[here, there]}"
        mine = End(self, process, listener.process.host, name, sock)
        other = End(self, listener.process, process.host, name, None)
        mine.pair(other, (here, self._port(here)), listener.address)
        mine.will_break(self._breaking.get(frozenset((here, there)), 0.0))
        listener.process.call_soon(listener.accept, other)
        protocol = factory()
        mine.begin(protocol)
        return mine, protocol

    def passes(self, one: str, other: str) -> bool:
        vanished = one in self._vanished or other in self._vanished
        return not vanished and frozenset((one, other)) not in self._cut

    def rng(self, name: str) -> Random:
        return Random(f"{self._seed}/{name}")

    def fake_socket(self, here: Address, there: Address | None) -> FakeSocket:
        return FakeSocket(self._quiet, here, there)

    def note(self, end: End) -> None:
        self._ends[end] = None

    def forget(self, end: End) -> None:
        self._ends.pop(end, None)

    def _port(self, host: str) -> int:
        self._ports[host] += 1
        return EPHEMERAL + self._ports[host]


class Listener(asyncio.AbstractServer):
    """The result of `loop.create_server`."""

    def __init__(self, network: Network, process: Process, factory: Any, address: Address) -> None:
        self.process = process
        self.address = address
        self.sockets = (network.fake_socket(address, None),)
        self._network = network
        self._factory = factory

    def accept(self, end: End) -> None:
        end.begin(self._factory())

    def close(self) -> None:
        self._network.unlisten(self)

    async def wait_closed(self) -> None:
        """Does nothing: accepted connections stay open."""


class FakeSocket:
    """The calls that programs make on a transport's socket. `dead_s`: seconds after which the
    system gives up a silent peer; 0: it waits forever."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = 0

    def __init__(self, quiet: int, here: Address, there: Address | None) -> None:
        self._quiet = quiet
        self._here = here
        self._there = there
        self.dead_s = 0.0

    def fileno(self) -> int:
        return self._quiet

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
            self.dead_s = value / 1000

    def getsockname(self) -> Address:
        return self._here

    def getpeername(self) -> Address | None:
        return self._there


class End(asyncio.Transport):
    """One end of a connection: a process writes to it and gets the received data from it."""

    def __init__(self, network: Network, process: Process, peer: str, name: str, sock: Any) -> None:
        super().__init__()
        self.process = process
        self.link = frozenset((process.host, peer))
        self._network = network
        self._sock = sock
        self._rng = network.rng(f"{name}-{process.host}")
        self._protocol: Any = None
        self._other: End
        self._socket: FakeSocket
        self._breaks_in: int | None = None
        self._outbox: list[bytes | None] = []  # not yet in a packet; None: end of data
        self._on_the_way: dict[int, list[bytes | None]] = {}  # by packet number, in order
        self._sent = 0  # packets
        self._missed = 0  # the last packet that was held back and not yet sent again
        self._arrives_at = 0.0  # time of the last packet in flight
        self._inbox: list[bytes | None] = []
        self._unread = 0  # bytes written, but not read by the other end
        self._reading = True
        self._throttled = False
        self._eof_sent = False
        self._closing = False
        self._lost = False
        network.note(self)

    def will_break(self, share: float) -> None:
        """Break with probability `share`, in the middle of a request or of an answer."""
        if self._rng.random() < share:
            end = self if self._rng.random() < 0.5 else self._other
            end._breaks_in = self._rng.randrange(6)

    def pair(self, other: End, here: Address, there: Address) -> None:
        self._other, other._other = other, self
        for end, mine, its in ((self, here, there), (other, there, here)):
            end._socket = end._network.fake_socket(mine, its)
            end._extra |= {"socket": end._socket, "sockname": mine, "peername": its}

    def begin(self, protocol: Any) -> None:
        if not self._lost:
            self._protocol = protocol
            protocol.connection_made(self)
            self._read()

    # -- asyncio.Transport -----------------------------------------------------------------

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self.process.call_soon(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Does nothing: the limits are fixed."""

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return LOW_WATER, HIGH_WATER

    def get_write_buffer_size(self) -> int:
        return max(0, self._unread - SYSTEM_BUFFER)

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: Any) -> None:
        if not data or self._lost or self._eof_sent:
            return
        self._unread += len(data)
        self._send(bytes(data))
        if self.get_write_buffer_size() > HIGH_WATER and not self._throttled:
            self._throttled = True
            self._protocol.pause_writing()

    def writelines(self, parts: Sequence[Any]) -> None:  # type: ignore[override]
        self.write(b"".join(parts))

    def write_eof(self) -> None:
        if not self._eof_sent:
            self._eof_sent = True
            self._send(None)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.write_eof()
            self.process.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self._closing and self._inbox:
            self._closing = True
            self._tell_reset()
            self.process.call_soon(self._lose, None)
        self.close()

    # -- packets ---------------------------------------------------------------------------

    def _send(self, data: bytes | None) -> None:
        self._outbox.append(data)
        self.flush()

    def flush(self) -> None:
        """Send the written data if the link works, and send held-back packets again."""
        if (self._missed or self._outbox) and self._network.passes(*self.link_hosts):
            self._sent += 1
            self._on_the_way[self._sent] = self._outbox
            self._outbox, self._missed = [], 0
            now = self.process.time()
            rng = self._rng
            took = self._network.latency_s * (1 + rng.random() + 20 * (rng.random() < 0.02))
            self._arrives_at = max(self._arrives_at, now + took)
            # On the world's loop: the system of a dead process still answers.
            self._network.kernel.call_at(self._arrives_at, self._arrived, self._sent)

    def _arrived(self, last: int) -> None:
        """A packet reaches the other end, if the link works; the reader gets packets in the order
        in which they were sent."""
        if self._network.passes(*self.link_hosts):
            packets = self._take(last)
            if packets:
                self._other.arrive(packets)
        elif self.process.dead:  # its system has no state of the connection
            self._take(last)
        else:
            self._missed = last
            self._network.note(self)

    def _take(self, last: int) -> list[bytes | None]:
        """Remove and return the packets in flight up to this one."""
        numbers = [number for number in self._on_the_way if number <= last]
        return [data for number in numbers for data in self._on_the_way.pop(number)]

    @property
    def link_hosts(self) -> tuple[str, str]:
        return self.process.host, self._other.process.host

    def arrive(self, packets: list[bytes | None]) -> None:
        """Packets from the other end have arrived."""
        if self._lost or self.process.dead:
            if any(packets):
                self._tell_reset()
            return
        if self._breaks_in is not None:
            self._breaks_in -= 1
            if self._breaks_in < 0:
                self.break_off()
                return
        self._inbox += packets
        if self._protocol is not None:
            self.process.call_soon(self._read)

    def _read(self) -> None:
        while self._inbox and self._reading and not self._closing:
            packet = self._inbox.pop(0)
            if packet is None:
                if not self._protocol.eof_received():
                    self.close()
                return
            self._other.was_read(len(packet))
            self._protocol.data_received(packet)

    def was_read(self, size: int) -> None:
        """The other end has read `size` bytes."""
        self._unread -= size
        if self._throttled and self.get_write_buffer_size() <= LOW_WATER and not self._lost:
            self._throttled = False
            self.process.call_soon(self._go_on_writing)

    def _go_on_writing(self) -> None:
        if not self._lost:
            self._protocol.resume_writing()

    # -- its end ---------------------------------------------------------------------------

    def break_off(self) -> None:
        """Break the connection and notify both ends."""
        self.receive_reset()
        self._other.receive_reset()

    def die(self, *, silently: bool) -> None:
        """The end's process has died."""
        self._lost = self._closing = True
        if silently:
            self._take(self._missed)
            self._missed, self._outbox = 0, []
            self._other.lose_sight()
        elif self._inbox or self._rng.random() < 0.5:
            self._tell_reset()
        else:
            self.write_eof()
        self._free()

    def lose_sight(self) -> None:
        """The other end has vanished silently; with keepalive this end is notified later."""
        if self._socket.dead_s:
            self._network.kernel.call_later(self._socket.dead_s, self.receive_reset)

    def _tell_reset(self) -> None:
        """Notify the other end, if the link works."""
        if self._network.passes(*self.link_hosts):
            took = self._network.latency_s
            self._network.kernel.call_later(took, self._other.receive_reset)

    def receive_reset(self) -> None:
        if not self._lost and not self.process.dead:
            self._closing = True
            error = ConnectionResetError(104, "Connection reset by peer")
            self.process.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self._free()
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def _free(self) -> None:
        if self._sock is not None:
            self._sock.close()
        if not (self._missed or self._outbox):
            self._network.forget(self)
