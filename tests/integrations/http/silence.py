"""Two network namespaces, one of which stops answering; run in the first one by test_liveness.

Prints how long it took to notice, in seconds: for a request that waits for its answer (probes go
unanswered) and for one that is sent into the silence (nothing acknowledges it).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import uvloop

from rollout_sched.integrations.http import Pool
from tests.integrations.http.wires import Heard, ok, read_message

DEAD_S = 2.0
NEAR, FAR, PORT = "10.211.0.1", "10.211.0.2", 8000


async def answer() -> None:
    """The far side: answers /1, and never anything else."""

    async def peer(reader, writer):
        while True:
            if b"GET /1 " in await read_message(reader):
                writer.write(ok())

    server = await asyncio.start_server(peer, FAR, PORT)
    print("listening", flush=True)
    await server.serve_forever()


async def ask(fall_silent) -> None:
    pools = [Pool(f"http://{FAR}:{PORT}", dead_s=DEAD_S, keepalive_s=100.0) for _ in range(2)]
    for pool in pools:
        assert (await pool.request("GET", "/1", timeout_s=10)).body == b"ok"
    waiting, sending = Heard(), Heard()
    pools[0].send("GET", "/2", (), b"", waiting)
    await asyncio.sleep(0.2)
    fall_silent()
    pools[1].send("GET", "/2", (), b"x", sending)
    began = time.monotonic()

    async def noticed(name: str, heard: Heard) -> None:
        await heard.over.wait()
        assert heard.calls == ["error"]
        print(name, time.monotonic() - began)

    await asyncio.gather(noticed("waiting", waiting), noticed("sending", sending))


def main(loop: str) -> None:
    far = subprocess.Popen(
        ["unshare", "-n", sys.executable, "-m", __spec__.name, "far"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def there(*command: str) -> None:
        subprocess.run(["nsenter", "-t", str(far.pid), "-n", *command], check=True)

    def here(*command: str) -> None:
        subprocess.run(command, check=True)

    try:
        while os.readlink(f"/proc/{far.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        here("ip", "link", "add", "near", "type", "veth", "peer", "name", "far")
        here("ip", "link", "set", "far", "netns", str(far.pid))
        here("ip", "addr", "add", f"{NEAR}/24", "dev", "near")
        here("ip", "link", "set", "near", "up")
        there("ip", "addr", "add", f"{FAR}/24", "dev", "far")
        there("ip", "link", "set", "far", "up")
        far.stdin.write("go\n")
        far.stdin.flush()
        assert far.stdout.readline() == "listening\n"
        factory = uvloop.new_event_loop if loop == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(ask(lambda: there("ip", "route", "add", "blackhole", f"{NEAR}/32")))
    finally:
        far.kill()
        far.wait()


if __name__ == "__main__":
    if sys.argv[1] == "far":
        sys.stdin.readline()  # until there is a network
        asyncio.run(answer())
    else:
        main(sys.argv[1])
