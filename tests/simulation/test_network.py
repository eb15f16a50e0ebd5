"""The simulated network keeps the guarantees of TCP under all faults of its links."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.simulation.kernel import Kernel
from tests.simulation.network import Network


class Reader(asyncio.Protocol):
    def __init__(self) -> None:
        self.read = b""

    def data_received(self, data: bytes) -> None:
        self.read += data


@pytest.mark.parametrize("seed", range(60))
def test_bytes_arrive_in_order_however_the_link_is_cut(seed: int) -> None:
    kernel, rng, reader = Kernel(), Random(seed), Reader()
    network = Network(kernel, seed, latency_s=0.03)
    server = kernel.spawn("server", "10.0.0.1", network)
    client = kernel.spawn("client", "10.0.0.2", network)
    hosts = (server.host, client.host)
    written = bytes(range(100))

    async def main() -> None:
        await server.create_server(lambda: reader, server.host, 80)
        transport, _ = await client.create_connection(asyncio.Protocol, server.host, 80)
        for byte in written:
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.1)))
            if rng.random() < 0.2:
                rng.choice((network.cut, network.mend))(*hosts)
            transport.write(bytes([byte]))
        network.mend(*hosts)
        await asyncio.sleep(10)

    try:
        kernel.run_until_complete(main())
    finally:
        network.close()
        kernel.close()
    assert reader.read == written
