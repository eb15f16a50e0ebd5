"""All live benches one after the other: `python -m benchmarks.live [--quick]`.

Exit code 1 if one of them missed something.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.live import rollout_steps, rollout_time, router_overhead


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.live", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter, to see it work")
    arguments = ["--quick"] if parser.parse_args().quick else []
    benches = (router_overhead, rollout_time, rollout_steps)
    return max(bench.main(arguments) for bench in benches)


if __name__ == "__main__":
    sys.exit(main())
