"""`make demo-vllm`: the live demo in front of two real vLLM servers on the CPU.

The model is tiny and random; each training step loads another random one, so the weights really
change under the running requests.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from rollout_sched import demo
from tests.vllm import tiny_model
from tests.vllm.servers import serving


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for version in range(demo.STEPS + 1):
            tiny_model.main([str(folder / f"tiny-{version}"), "--seed", str(version)])
        flags = ("--enable-scale-out",)
        servers = [
            stack.enter_context(
                serving(folder / "tiny-0", folder, *flags, dev_mode=True, core=core)
            )
            for core in range(demo.INSTANCES)
        ]
        urls = [server.wait() for server in servers]
        options = demo.DemoOptions(
            policies=["areal"],
            instances=urls,
            weights=str(folder / "tiny-{version}"),
        )
        demo.demo(options)


if __name__ == "__main__":
    main()
