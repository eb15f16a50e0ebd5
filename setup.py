"""Compiles the hot path with mypyc where ROLLOUT_SCHED_COMPILE=1 asks for it; see DESIGN.md, Speed.

The sources are the same and so is what they do; without it, as in a checkout that is worked on,
everything is plain Python.
"""

import os
import tomllib

from setuptools import setup

#: What every event and every request passes through. Modules whose classes inherit from classes of
#: the interpreter, as errors do, cannot be compiled, and structs are C already.
HOT = {
    "core": "attempts backoff blame event_handlers fleet groups lifecycle outcomes progress "
    "replay_buffer requests sample_buffer scheduler sessions siblings updater validation waiting",
    "live": "attempt_table attempts driver event_pump payload_book",
    "integrations/http": "bearer bodies client exchange heads request server",
    "integrations/vllm": "proxy throttle",
    "integrations/vllm/protocol": "endpoints event_stream request_ids",
    "integrations/gateway/control_plane": "counters",
    "integrations/gateway/data_plane": "call client_request client_stream data_plane dialects "
    "envelope fanout http_reply open_calls pacer splice split stream stream_tokens streaming_call "
    "unary_call",
}


def requires():
    """mypyc, and what it has to see the types of."""
    with open("pyproject.toml", "rb") as file:
        return ["mypy>=1.18", *tomllib.load(file)["project"]["dependencies"]]


def extensions():
    try:
        from mypyc.build import mypycify
    except ImportError:
        return []  # asked what it requires, before that is there
    return mypycify(
        [
            f"rollout_sched/{folder}/{module}.py"
            for folder, modules in HOT.items()
            for module in modules.split()
        ],
        group_name="rollout_sched",
    )


if os.environ.get("ROLLOUT_SCHED_COMPILE") == "1":
    setup(setup_requires=requires(), ext_modules=extensions())
else:
    setup()
