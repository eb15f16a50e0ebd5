"""The cost of naming tokens twice: `python benchmarks/token_names.py`.

CPU time, for an answer of /inference/v1/generate, of the step that names the tokens of its
log-probs in both ways, and of reading the same answer: without log-probs, and with those of each
token and of one candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from rollout_sched.integrations.gateway.data_plane.answers import both_spellings, read_answer

REPETITIONS = 9


def answer(tokens: int, *, logprobs: bool) -> bytes:
    ids = [number * 37 % 150_000 for number in range(tokens)]
    told = [{"token_id": token, "logprob": -token / 7, "rank": 1} for token in ids]
    content = [{**one, "top_logprobs": [one]} for one in told]
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "token_ids": ids}
    choice["logprobs"] = {"content": content} if logprobs else None
    usage = {"prompt_tokens": 1, "completion_tokens": tokens}
    return msgspec.json.encode({"request_id": "x", "choices": [choice], "usage": usage})


def microseconds(do: Callable[[bytes], object], body: bytes, times: int) -> float:
    """The minimum CPU time of several tries."""
    tries = []
    for _ in range(REPETITIONS):
        start = time.thread_time()
        for _ in range(times):
            do(body)
        tries.append((time.thread_time() - start) / times)
    return min(tries) * 1e6


def main() -> None:
    print("tokens  log-probs    bytes   read, us   name, us")
    for tokens in (1, 256, 4096):
        for logprobs in (False, True):
            body = answer(tokens, logprobs=logprobs)
            times = max(3, 3000 // tokens)
            read = microseconds(lambda one: read_answer(one, "generate"), body, times)
            name = microseconds(both_spellings, body, times)
            print(f"{tokens:6,d}  {logprobs!s:9} {len(body):8,d} {read:10.1f} {name:10.1f}")


if __name__ == "__main__":
    main()
