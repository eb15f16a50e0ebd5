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
    "live": "attempts driver",
    "integrations/http": "answer_heads backlog bodies body_budget client client_connection "
    "connections dialler exchange head_buffer heads idle_connections limits origin request server "
    "server_connection",
    "integrations/vllm": "proxy throttle",
    "integrations/gateway/control_plane": "counters",
    "integrations/gateway/data_plane": "call data_plane dialects envelope fanout pacer splice "
    "split streaming_call unary_call wire",
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
