"""What is missing, in a line, where a trainer waits for what does not come by itself."""

from __future__ import annotations

from rollout_sched.core.groups import HERE, JUDGING
from rollout_sched.live.driver import Driver


def batch(driver: Driver) -> str:
    """For the next batch; "" if it is being made, or there is nothing left to make."""
    view, run = driver.view, driver.view.run
    if not view.instances:
        return _nobody(driver)
    if view.in_flight or run.updating:
        return ""
    if view.waiting:
        return f"{view.waiting} requests wait for an instance that takes them: {_fleet(driver)}"
    if driver.front.tools:
        return f"tools of {len(driver.front.tools)} trajectories have not returned"
    if view.groups(JUDGING):
        return f"rewards of {view.groups(JUDGING)} groups are not there yet"
    if run.closed and not any(view.groups(state) for state in HERE):
        return ""
    here = sum(view.groups(state) for state in HERE)
    prompts = "" if run.closed else "more prompts, or close_submissions()"
    newer = f"weights after version {run.version}" if run.batches else ""
    asked = ", or ".join(filter(None, (prompts, newer)))
    return (
        f"{run.prompts_per_step} groups make a batch, {here} are here and nothing runs: it takes "
        f"{asked}"
    )


def weights(driver: Driver) -> str:
    """For the newest version to be loaded everywhere; "" if nothing is missing."""
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
    return f"no instance has joined: {', '.join(away) or 'none is known, add_instance(url)'}"


def _fleet(driver: Driver) -> str:
    return ", ".join(
        f"{instance.id} is {instance.status} at version {instance.version}"
        for instance in driver.view.instances
    )
