"""How fast the store is: `python benchmarks/store_speed.py [--peers PYTHON]`.

Samples of 51 KB (512 tokens of prompt and 4,096 of response as int32, their mask as int32, their
log-probs as float32) in groups of eight go through a store in batches of 64: written a group at a
time, promised a batch at a time, read back whole, and acknowledged, which lets them go. The next
batch is being written meanwhile. Beside it the same samples go through a bare ZeroMQ queue
(PUSH and PULL, in one process), and through TransferQueue in batches, each if the interpreter
that `--peers` names has it installed. Neither writes to a disk.

Then how long a store takes to open, by its size; and what an event of the live driver costs its
loop with a store and without, in front of instances that answer at once. Targets: 5,000 durable
samples a second; 2 s to open; 1.3 times the cost of an event. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

RESPONSE, PROMPT, GROUP, BATCH = 4096, 512, 8, 64

#: Durable samples a second and those of a store that never syncs, seconds to open, and how many
#: times as much an event costs.
TARGETS = {"batch": 5_000, "off": 15_000}
OPENED_S = 2.0
EVENT = 1.3

#: Tokens of a response of the event's measurement.
ANSWER = 256

#: Batches that are under way at once: one is written while another is read.
UNDER_WAY = 3


def main() -> int:
    options = _options()
    if options.only:
        print(f"{PEERS[options.only](_samples(), options.batches):.0f}")
        return 0
    missed = 0
    print(f"samples of {len(b''.join(_samples()[0])) / 1000:.1f} KB, batches of {BATCH}")
    print("through                     samples/s   spread         target")
    for durable in ("batch", "event", "off"):
        rates = [_through_a_store(durable, options) for _ in range(options.repetitions)]
        target = TARGETS.get(durable)
        missed += bool(target and statistics.median(rates) < target)
        print(_line(f"store, durable {durable}", rates, target))
    for peer in PEERS:
        asked = [_asked(options, peer) for _ in range(options.repetitions)]
        rates = [rate for rate in asked if rate is not None]
        print(_line(peer, rates, None) if rates else f"{peer:24s}   not installed")
    print("\nlive MB   pieces   opened in s   target")
    for megabytes in options.sizes:
        took = _opening(megabytes, options)
        missed += took[1] > OPENED_S
        verdict = "met" if took[1] <= OPENED_S else "MISSED"
        print(f"{megabytes:7d} {took[0]:8d} {took[1]:13.2f}   {OPENED_S:g} {verdict}")
    missed += _show_events(options) > EVENT
    return int(missed > 0)


def _show_events(options: argparse.Namespace) -> float:
    """How many times as much an event costs with a store."""
    print(f"\nan event of the live driver, answers of {ANSWER} tokens, us of its loop's CPU")
    ratios = []
    for _ in range(options.repetitions):
        bare, stored = (asyncio.run(_event_us(on, options)) for on in (False, True))
        ratios.append(stored / bare)
        print(f"without {bare:.0f}   with {stored:.0f}   {ratios[-1]:.2f} times")
    ratio = statistics.median(ratios)
    print(f"{ratio:.2f} times, target {EVENT:g} {'met' if ratio <= EVENT else 'MISSED'}")
    return ratio


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=sys.executable, help="interpreter with the peers")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=[50, 200, 1000], metavar="MB")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--only", choices=PEERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _line(what: str, rates: list[float], target: int | None) -> str:
    median = statistics.median(rates)
    verdict = ""
    if target is not None:
        verdict = f"{target:,d} {'met' if median >= target else 'MISSED'}"
    return f"{what:24s} {median:12,.0f}   {min(rates):,.0f}-{max(rates):,.0f}   {verdict}"


def _samples() -> list[list[bytes]]:
    """A batch of them: prompt, response, mask and log-probs of each."""
    rng = np.random.default_rng(0)
    return [
        [
            rng.integers(0, 150_000, PROMPT, dtype=np.int32).tobytes(),
            rng.integers(0, 150_000, RESPONSE, dtype=np.int32).tobytes(),
            np.ones(RESPONSE, np.int32).tobytes(),
            rng.standard_normal(RESPONSE).astype(np.float32).tobytes(),
        ]
        for _ in range(BATCH)
    ]


def _through_a_store(durable: str, options: argparse.Namespace) -> float:
    from rollout_sched.store import Store, StoreWriter
    from rollout_sched.store.transaction import Transaction

    folder = Path(tempfile.mkdtemp(dir=options.folder))
    samples = [b"".join(parts) for parts in _samples()]
    writer = StoreWriter(Store(folder / "store", durable=durable), print)

    def promised(number: int):
        for group in range(0, BATCH, GROUP):
            changes = Transaction()
            for index in range(group, group + GROUP):
                changes.append(f"{number}.{index}", 0, samples[index])
                changes.put("sample", f"{number}.{index}", b"counts" * 10)
            writer.write(changes)
        return writer.promise()

    def received(number: int) -> None:
        acknowledged = Transaction()
        for index in range(BATCH):
            (data,) = writer.store.pieces(f"{number}.{index}").values()
            assert len(data) == len(samples[index])
            acknowledged.clear(f"{number}.{index}")
            acknowledged.drop("sample", f"{number}.{index}")
        writer.write(acknowledged)

    def run(first: int, batches: int) -> None:
        under_way = deque()
        for number in range(first, first + batches):
            under_way.append((number, promised(number)))
            if len(under_way) == UNDER_WAY:
                _receive(under_way, received)
        while under_way:
            _receive(under_way, received)

    run(0, 10)  # the database and its log grow, and from here on are written over
    start = time.perf_counter()
    run(10, options.batches)
    rate = options.batches * BATCH / (time.perf_counter() - start)
    writer.close()
    shutil.rmtree(folder)
    return rate


def _receive(under_way: deque, received: Callable[[int], None]) -> None:
    number, promise = under_way.popleft()
    promise.result()
    received(number)


def _opening(megabytes: int, options: argparse.Namespace) -> tuple[int, float]:
    """Pieces of 51 KB, and seconds until the store is open."""
    from rollout_sched.store import Store
    from rollout_sched.store.transaction import Transaction

    folder = Path(tempfile.mkdtemp(dir=options.folder))
    sample = b"".join(_samples()[0])
    pieces = megabytes * 10**6 // len(sample)
    store = Store(folder / "store")
    for start in range(0, pieces, BATCH):
        changes = Transaction()
        for number in range(start, min(start + BATCH, pieces)):
            changes.append(f"{number}", 0, sample)
            changes.put("group", f"{number}", b"counts" * 50)
        store.apply(changes)
        store.tidy()
    store.close()
    begun = time.perf_counter()
    store = Store(folder / "store")
    took = time.perf_counter() - begun
    store.close()
    shutil.rmtree(folder)
    return pieces, took


class Answering:
    """An instance that answers at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def describe(self):
        from rollout_sched.live.ports import Description

        return Description(64, 10**7, 10**6)

    async def generate(self, order, on_tokens=None):
        from rollout_sched.live.ports import Output

        await asyncio.sleep(0)
        return Output(list(range(ANSWER)), [-0.5] * ANSWER, "stop")

    async def gauges(self):
        from rollout_sched.live.ports import Gauges

        return Gauges(0, 0, 0.0)

    async def nothing(self, *words) -> None: ...

    abort = pause = resume = set_version = close = nothing


async def _event_us(stored: bool, options: argparse.Namespace) -> float:
    from rollout_sched import load_policy
    from rollout_sched.live import LiveScheduler, RunOptions
    from rollout_sched.live.trainer.samples import Prompt

    folder = Path(tempfile.mkdtemp(dir=options.folder))
    run = RunOptions(prompts_per_step=BATCH, store=folder / "store" if stored else None)
    live = LiveScheduler(load_policy("round_robin_sync"), run)
    events = 0

    def count(now, event, actions) -> None:
        nonlocal events
        events += 1

    live.driver.pump.observers.append(count)
    for number in range(4):
        await live.driver.add_instance(Answering(f"i{number}"))
    prompts = options.batches * BATCH
    live.trainer.submit(
        Prompt(f"{n}", [1] * 100, GROUP, 10_000, {"logprobs": 0}) for n in range(prompts)
    )
    await live.trainer.durable()
    start, before, received = time.thread_time(), events, None
    for _ in range(options.batches):
        received = (await live.trainer.next_batch(received)).number
    cost = (time.thread_time() - start) / (events - before) * 1e6
    await live.close()
    shutil.rmtree(folder)
    return cost


def _asked(options: argparse.Namespace, peer: str) -> float | None:
    """What the other interpreter measures; None if it does not have the peer.

    Raises CalledProcessError if the measurement fails, after what the peer wrote to its stderr.
    """
    command = [options.peers, __file__, "--only", peer, "--batches", str(options.batches)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in told.stderr:
        return None
    if told.returncode:
        print(told.stderr, file=sys.stderr)
        told.check_returncode()
    return float(told.stdout.split()[-1])


def _zeromq(samples: list[list[bytes]], batches: int) -> float:
    import msgspec
    import zmq

    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.set_hwm(0)
    push.set_hwm(0)
    push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    encode = msgspec.msgpack.Encoder().encode

    def send() -> None:
        for _ in range(batches):
            for group in range(0, BATCH, GROUP):
                push.send(encode(samples[group : group + GROUP]), copy=False)

    start = time.perf_counter()
    sender = threading.Thread(target=send)
    sender.start()
    for _ in range(batches * BATCH // GROUP):
        assert len(msgspec.msgpack.decode(pull.recv())) == GROUP
    sender.join()
    rate = batches * BATCH / (time.perf_counter() - start)
    context.destroy(0)
    return rate


def _transfer_queue(samples: list[list[bytes]], batches: int) -> float:
    """Its key-value interface with the storage that it has by default."""
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init()
    names = ("prompts", "responses", "response_mask", "rollout_log_probs")
    kinds = (torch.int32, torch.int32, torch.int32, torch.float32)
    fields = TensorDict(
        {
            name: torch.stack(
                [torch.frombuffer(bytearray(parts[place]), dtype=kind) for parts in samples]
            )
            for place, (name, kind) in enumerate(zip(names, kinds, strict=True))
        },
        batch_size=BATCH,
    )
    start = time.perf_counter()
    for number in range(batches):
        keys = [f"{number}_{index}" for index in range(BATCH)]
        tags = [{"status": "success"}] * BATCH
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)
        got = tq.kv_batch_get(keys=keys, partition_id="train")
        assert len(got["responses"]) == BATCH
        tq.kv_clear(keys=keys, partition_id="train")
    rate = batches * BATCH / (time.perf_counter() - start)
    tq.close()
    ray.shutdown()
    return rate


PEERS = {"zeromq": _zeromq, "transfer-queue": _transfer_queue}


if __name__ == "__main__":
    sys.exit(main())
