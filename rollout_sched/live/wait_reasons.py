"""Says in one line what is missing when a trainer waits for something that needs its action."""

from __future__ import annotations

from rollout_sched.core.groups import HERE, JUDGING
from rollout_sched.live.driver import Driver


def batch(driver: Driver) -> str:
    """What the next batch lacks; "" if it is being made, or there is nothing left to make."""
    view, run = driver.view, driver.view.run
    if not view.instances:
        return _nobody(driver)
    if view.in_flight or run.updating:
        return ""
    if view.waiting:
        return f"{view.waiting} requests wait for an available instance: {_fleet(driver)}"
    if driver.front.tools:
        return f"tools of {len(driver.front.tools)} trajectories have not returned"
    if view.groups(JUDGING):
        return f"rewards of {view.groups(JUDGING)} groups are not computed yet"
    if run.closed and not any(view.groups(state) for state in HERE):
        return ""
    here = sum(view.groups(state) for state in HERE)
    prompts = "" if run.closed else "more prompts, or close_submissions()"
    newer = f"weights after version {run.version}" if run.batches else ""
    asked = ", or ".join(filter(None, (prompts, newer)))
    return (
        f"a batch needs {run.prompts_per_step} groups, {here} are here and nothing runs; missing: "
        f"{asked}"
    )


def weights(driver: Driver) -> str:
    """Why the newest version is not loaded everywhere; "" if nothing is missing."""
    view, newest = driver.view, driver.view.run.version
    if not view.instances:
        return _nobody(driver)
    if view.run.updating:
        return ""
    behind = any(instance.version < newest for instance in view.instances)
    return f"not every instance has loaded it: {_fleet(driver)}" if behind else ""


def _nobody(driver: Driver) -> str:
    """Why no instance has joined."""
    away = [f"{name} ({one.reason})" for name, one in driver.supervisors.items()]
    return f"no instance has joined: {', '.join(away) or 'none is known; call add_instance(url)'}"


def _fleet(driver: Driver) -> str:
    return ", ".join(
        f"{instance.id} is {instance.status} at version {instance.version}"
        for instance in driver.view.instances
    )
