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
    "core": "attempts backoff blame books decider deliverer dispatcher event_handlers event_table "
    "expectations facts finished_samples fleet gathering group_outcomes groups judgement kv_sizes "
    "launcher lender length_history lifecycle migrator model open_instances outcomes progress "
    "replay_buffer requests restorer sample_buffer scheduler selection_window serials session_room "
    "sessions siblings snapshot tuning updater validation verification waiting work",
    "metrics": "attempt_index bubbles client_times fleet_fold fleet_shares folded histogram "
    "live_steps metrics sample_times steps trained waste",
    "simulators/instance": "attempt decode_batch engine_core event_jump inbox kv_blocks "
    "request_limits sim_counters sim_instance step_scheduler step_time",
    "simulators/replay": "clients closed_loop event_queue membership part_training run_notes "
    "shared_gpus sim_attempts sim_fleet sim_node sim_trainer telemetry workload",
    "store": "changes",
    "live": "answer_checks attempt_starter attempt_table attempts driver endings event_pump "
    "fleet_orders front judging live_fleet open_transaction payload_book run_clock "
    "running_attempts scheduler_link store_keeper stored_session stored_transcripts tool_calls",
    "integrations/http": "answer_heads backlog bearer bodies body_budget client client_connection "
    "connections dialler exchange head_buffer heads idle_connections limits origin request server "
    "server_connection",
    "integrations/vllm": "proxy throttle",
    "integrations/vllm/protocol": "endpoints event_stream request_ids",
    "integrations/gateway/control_plane": "counters",
    "integrations/gateway/data_plane": "call client_request client_stream data_plane dialects "
    "envelope fanout http_reply open_calls pacer responses splice split stream stream_tokens "
    "streaming_call token_names unary_call",
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
    return modules


if os.environ.get("ROLLOUT_SCHED_COMPILE") == "1":
    setup(setup_requires=requires(), ext_modules=extensions())
else:
    setup()
