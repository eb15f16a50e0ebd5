"""The servers of the examples: real vLLM servers of a tiny random model, on the CPU."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rollout_sched.core.errors import CallerError

VOCABULARY = 512
SLOTS = 64
MODEL = ("--vocab", str(VOCABULARY), "--hidden", "64", "--heads", "2", "--kv-heads", "1")
FLAGS = ("--enable-scale-out", "--max-num-seqs", str(SLOTS))
_ASK_S = 10.0


class Fleet:
    """Servers of one model, and the newest version that was published to them."""

    def __init__(self, urls: Sequence[str], model: Path) -> None:
        self.urls = urls
        self.model = model
        self.version = 0


def check_real(url: str, model: Path) -> None:
    """Raises CallerError if a server does not serve the model. A simulated server's tokens do not
    come from weights, so a model cannot learn from them."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=_ASK_S) as answer:
            served = json.load(answer)["data"][0]["root"]
    except (urllib.error.URLError, OSError, ValueError, LookupError, TypeError) as error:
        raise CallerError(f"{url}: cannot read which model it serves: {error}") from error
    if Path(served).resolve() != model.resolve():
        raise CallerError(
            f"{url} serves {served}, not the weights in {model}: start `vllm serve {model}`. "
            "Simulated instances cannot be used here, because their tokens do not come from weights"
        )


@contextmanager
def servers(folder: Path, instances: int) -> Iterator[Fleet]:
    """vLLM servers on the CPU with a model of their own."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise CallerError(
            "vLLM is not installed here: use `make example`, whose environment has it"
        ) from error
    from tests.vllm import tiny_model
    from tests.vllm.servers import serving

    model = folder / "tiny"
    tiny_model.main([str(model), *MODEL])
    with ExitStack() as stack:
        started = [
            stack.enter_context(serving(model, folder, *FLAGS, dev_mode=True, core=core))
            for core in range(instances)
        ]
        yield Fleet([server.wait() for server in started], model)
