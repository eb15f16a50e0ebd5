"""Run all live benchmarks one after the other: `python -m benchmarks.live [--quick]`.

Exit code 1 if one of them missed a target.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.live import rollout_steps, rollout_time, router_overhead


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.live", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter, as a smoke test")
    arguments = ["--quick"] if parser.parse_args().quick else []
    return max(
        router_overhead.main(arguments),
        rollout_time.main(arguments),
        rollout_steps.main(arguments),
    )


if __name__ == "__main__":
    sys.exit(main())
