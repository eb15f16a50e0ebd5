"""Compiles the hot path with mypyc where ROLLOUT_SCHED_COMPILE=1 asks for it; see docs/speed.md.

The sources are the same and so is what they do; without it, as in a checkout that is worked on,
everything is plain Python.
"""

import os

from setuptools import Extension, setup

#: What every event and every request passes through, by room. mypyc drops the parameters of the
#: annotations of a struct: one that msgspec decodes by them stands in another module.
HOT = {
    "core": "handlers scheduler validation",
    "core/model": "model request_ids",
    "core/state": "fleet groups lifecycle progress selection state waiting",
    "core/work": "attempts outcomes parts requests",
    "core/decide": "delivery dispatch lending order weights",
    "core/restart": "facts restore",
    "metrics": "attempts bubbles fold live metrics steps waste",
    "simulators/instance": "engine kv_blocks scheduler sim_instance step_time",
    "simulators/replay": "attempts closed_loop event_queue fleet sim_trainer workload",
    "integrations/http": "bodies client client_connection connections heads request server "
    "server_connection",
    "integrations/gateway/data_plane": "body call client_request data_plane fanout reply resume "
    "stream streaming_call unary_call",
}

#: Written in C.
C = ("integrations/gateway/data_plane/answer_scan",)


def requires():
    """mypyc, and what it has to see the types of."""
    import tomllib  # not in Python 3.10, whose pip is to say that it is too old

    with open("pyproject.toml", "rb") as file:
        return ["mypy>=1.18", *tomllib.load(file)["project"]["dependencies"]]


def extensions():
    try:
        from mypyc.build import mypycify
    except ImportError:
        return []  # asked what it requires, before that is there
    modules = mypycify(
        [
            f"rollout_sched/{folder}/{module}.py"
            for folder, modules in HOT.items()
            for module in modules.split()
        ],
        group_name="rollout_sched",
    )
    if os.name == "posix":
        for module in modules:
            # A product and a sum are rounded one by one, as Python does: else a simulated instance
            # would take other times where the processor can do both at once.
            module.extra_compile_args.append("-ffp-contract=off")
            # Calls between these functions need no table of the dynamic linker, and may be inlined.
            module.extra_compile_args.append("-fvisibility=hidden")
        for path in C:
            name = f"rollout_sched.{path.replace('/', '.')}"
            modules.append(Extension(name, [f"rollout_sched/{path}.c"]))
    return modules


if os.environ.get("ROLLOUT_SCHED_COMPILE") == "1":
    setup(setup_requires=requires(), ext_modules=extensions())
else:
    setup()
