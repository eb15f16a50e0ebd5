"""One run: its processes, its faults, its work, and the laws that are checked at its end."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from aiohttp import web_app

from rollout_sched.client.remote.calls import (
    GatewayError,
    TrainerClient,
)
from rollout_sched.config import load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import Event
from rollout_sched.integrations.vllm.weight_updates import Reload, update_of
from rollout_sched.live.instances.membership import MembershipState
from rollout_sched.live.settings import Settings
from rollout_sched.live.trainer.delivery import LeaseEnded
from rollout_sched.live.trainer.records import DELIVERED, GROUP, LOST, PROMPT, REWARD
from rollout_sched.live.trainer.rewards import RewardFailed
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.simulators.fake_instance import engine as fake
from rollout_sched.simulators.replay.runs import staleness_bound
from rollout_sched.store.errors import StoreBroken
from rollout_sched.store.store import Store
from tests.simulation import clients, faults, gateway, policy_file, rewards, tools
from tests.simulation.disk import rot_row, rot_tokens
from tests.simulation.gateway import Gateway
from tests.simulation.in_process import TrainersProcess
from tests.simulation.instance import Instance
from tests.simulation.kernel import Kernel, Process
from tests.simulation.ledger import LawBroken, Ledger, hold
from tests.simulation.network import Network
from tests.simulation.plan import AROUND_US, STEP_S, Plan
from tests.simulation.seams import simulated
from tests.simulation.tools import ToolBroken
from tests.simulation.trainer import Trainer

#: All work must end within these virtual seconds after the last fault, plus the time of the work
#: itself.
LIVENESS_S = 400.0

#: Virtual seconds after which ended work must have left nothing behind.
QUIET_S = 60.0

#: Journal lines shown for a failed run.
SHOWN = 30

#: Faults after which an instance has the weights of its start again.
RESTARTING = (faults.InstanceDies, faults.InstanceStandsStill, faults.InstanceLies)

#: Errors that a run provokes on purpose and that are logged with a traceback.
MEANT = (StoreBroken, RewardFailed, ToolBroken)

STRANGER = "127.0.2.9"

SETTINGS = Settings(
    poll_s=1.0,
    poll_timeout_s=2.0,
    misses=2,
    control_timeout_s=4.0,
    update_timeout_s=10.0,
    stall_s=6.0,
    forgotten_s=3.0,
    abort_timeout_s=3.0,
)


#: Garbage collections at the end: an interrupted program may start something new while it ends.
COLLECTIONS = 3


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one run.

    broken   the broken law; "" if none
    journal  digest of all events and actions of the gateway's schedulers
    work     the same, up to the end of all work
    told     what happened, in lines
    calls    for each well-behaved client its waiting time, its outcome and its answer
    """

    plan: Plan
    broken: str
    journal: str
    work: str
    told: list[str]
    calls: list[tuple[float, str, bytes]] = []
    virtual_s: float = 0.0

    @property
    def law(self) -> str:
        """The broken law, without the details."""
        return self.broken.partition(":")[0]


class World:
    """Everything of one run."""

    def __init__(self, plan: Plan, folder: Path, kernel: Kernel) -> None:
        self.plan = plan
        self.kernel = kernel
        self.network = Network(kernel, plan.seed, plan.latency_s)
        self.log: list[str] = []
        self.work = ""
        self._folder = folder
        self._entries: deque[str] = deque(maxlen=SHOWN)
        self._digest = hashlib.sha256()
        self.policy = policy_file.write(plan, folder)
        prompts = _prompts(plan)
        roles = load_policy(str(self.policy), allow_code=True).build()
        self.ledger = Ledger(
            prompts,
            staleness_bound(roles.freshness),
            plan.versioned,
            in_place=roles.interruption.at_update == "in_place" or plan.weights in AROUND_US,
            restarts=any(isinstance(fault, RESTARTING) for fault in plan.faults),
            lease_s=plan.lease_s,
            keeps_all=plan.rewards is None or not plan.rewards.keep,
            may_fail=bool(plan.faults or plan.attacks or plan.flood),
        )
        self.instances = [Instance(self, number) for number in range(plan.instances)]
        settings = msgspec.structs.replace(SETTINGS, durable=plan.durable, lease_s=plan.lease_s)
        kind = TrainersProcess if plan.in_process else Gateway
        self.gateway = kind(self, folder, settings)
        self.trainers = [
            Trainer(self, number, prompts[number :: plan.trainers])
            for number in range(plan.trainers)
        ]
        self._attacks: list[asyncio.Task[Any]] = []
        self.calls = [clients.Call(self, number) for number in range(plan.calls)]

    # -- calls of other parts --------------------------------------------------------------

    def spawn(self, name: str, host: str) -> Process:
        return self.kernel.spawn(name, host, self.network)

    def note(self, what: str) -> None:
        what = what.replace(str(self._folder), "")  # it differs in each run
        self.log.append(f"t={self.kernel.time():.3f} {what}")
        self._digest.update(self.log[-1].encode())

    def observer(self, life: int) -> Callable[[float, Event, list[Action]], None]:
        """Keeps the events and actions of the scheduler of one gateway process."""

        def observe(now: float, event: Event, actions: list[Action]) -> None:
            line = msgspec.json.encode((life, self.kernel.time(), event, actions))
            self._digest.update(line)
            self._entries.append(line.decode())

        return observe

    @property
    def journal(self) -> str:
        return self._digest.hexdigest()

    def told(self) -> list[str]:
        return [*self.log, "the last that the scheduler heard:", *self._entries]

    # -- the run ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Raises LawBroken, or any unexpected error."""
        for instance in self.instances:
            instance.start()
        self._do(self.gateway.keep_up())
        self._do(self._operate())
        for each in () if self.plan.in_process else self.trainers:
            self.kernel.call_later(1.0, each.start)
        for fault in self.plan.faults:
            self._do(self._befall(fault))
        rng = Random(f"clients/{self.plan.seed}")
        for call in self.calls:
            process = self.spawn(f"client {call.number}", f"127.0.3.{call.number + 1}")
            process.start(call.make(rng.uniform(clients.EARLIEST_S, self.plan.horizon_s)))
        for number, (at_s, kind) in enumerate(self.plan.attacks):
            process = self.spawn(f"attacker {number}", f"127.0.4.{number + 1}")
            self._attacks.append(process.start(clients.attack(self, number, at_s, kind)))
        if self.plan.flood is not None:
            process = self.spawn("flood", "127.0.5.1")
            self._attacks.append(process.start(clients.flood(self, *self.plan.flood)))
        await asyncio.sleep(self.plan.calm_s)
        self.note("all is mended")
        await self._until(self._is_done, LIVENESS_S + self._work_s(), "everything ends")
        self.work = self.journal
        attacked = clients.PATIENCE_S + self.plan.horizon_s
        await self._until(lambda: all(a.done() for a in self._attacks), attacked, "every call ends")
        self.ledger.check_end()
        self._check_calls()
        await self._until(lambda: not self.left(), QUIET_S, "nothing is left")
        live = self.gateway.live
        live.driver.pump.scheduler.check_invariants()
        await self._stop()

    def _do(self, what: Coroutine[Any, Any, Any]) -> None:
        task = self.kernel.create_task(what)
        task.add_done_callback(lambda task: task.cancelled() or task.result())

    async def _until(self, done: Callable[[], bool], limit_s: float, law: str) -> None:
        deadline = self.kernel.time() + limit_s
        while not done():
            hold(law, self.kernel.time() < deadline, self._state())
            await asyncio.sleep(0.5)

    def _is_done(self) -> bool:
        trained = all(each.done.is_set() for each in self.trainers)
        return trained and all(call.came for call in self.calls)

    def _check_calls(self) -> None:
        """Check that each call was answered, or refused because of a fault."""
        for call in self.calls:
            vanished = any(isinstance(f, faults.GatewayDies) and f.power for f in self.plan.faults)
            hold("every call ends", call.came != "not ended" or vanished, call.number)
            told = call.came.startswith(("broken off", "wrong: ", "not ended"))
            excused = told and bool(self.plan.faults) and not call.is_lied_to
            hold(
                "a client is answered", call.came == "answered" or excused, (call.number, call.came)
            )

    def _work_s(self) -> float:
        plan = self.plan
        tokens = plan.groups * plan.samples * plan.max_tokens * 3
        return tokens * STEP_S / plan.slots + plan.groups * (plan.train_s + 5)

    def _state(self) -> str:
        told: list[str] = [f"left: {self.left()}"]
        live = self.gateway.live
        if live is not None:
            told.append(str(live.state()))
            told += [f"{s.name}: {s.reason}" for s in live.driver.supervisors.values()]
        told += [f"call {call.number}" for call in self.calls if not call.came]
        return "\n  ".join(told)

    def left(self) -> str:
        """A description of what ended work still holds."""
        live, service = self.gateway.live, self.gateway.service
        if live is None:
            return "the gateway is away"
        driver, scheduler = live.driver, live.driver.pump.scheduler
        held = {
            "payloads": len(driver.front.payloads),
            "attempts": len(driver.front.attempts),
            "slots": len(scheduler.state.fleet.attempts),
            "requests": len(scheduler.parts.requests),
            "samples": live.trainer.submissions.open_samples,
            "on instances": sum(instance.busy for instance in self.instances),
        }
        if service is not None:
            held |= {
                "calls": service.data_plane.calls.open.requests,
                "bytes": service.data_plane.calls.open.body_bytes,
                "bodies": 0 if service._server is None else service._server.bodies.used,
            }
        return ", ".join(f"{count} {what}" for what, count in held.items() if count)

    async def _stop(self) -> None:
        """Stop the gateway cleanly and check that its store is empty. A gateway that finds a disk
        failure while it stops is restarted and stopped again."""
        process = None
        while process is None or process.dead:
            await self._until(lambda: self.gateway.live is not None, LIVENESS_S, "it is back")
            folder, process = self.gateway.store, self.gateway.process
            assert process is not None
            self.gateway.disk.crash_in = None  # the crash has not happened
            await self.gateway.stop(again=False)
        hold("no task is left", not process.tasks, process.tasks)
        store = Store(folder)
        kept = {kind: store.facts(kind) for kind in (GROUP, PROMPT, LOST, REWARD)}
        last = store.facts(DELIVERED)
        owners = store.owners()
        store.close()
        hold("nothing is left in the store", not any(kept.values()), kept)
        hold("no batch is left in the store", not last, list(last))
        hold("no token is left in the store", not owners, owners)

    # -- faults ----------------------------------------------------------------------------

    async def _operate(self) -> None:
        """As an operator does: restart instances that need it, or that the run needs with another
        model."""
        while True:
            await asyncio.sleep(5.0)
            live = self.gateway.live
            for instance in self.instances:
                server = instance.server
                if server is None:
                    continue
                watched = live and live.driver.supervisors.get(instance.url)
                unfit = watched and watched.membership.state is MembershipState.UNFIT
                required = live and live.driver.fleet.required_model(instance.url)
                serves = server.engine.settings.model
                model = required.name if required and required.of_run else serves
                if server.engine.dead or unfit or model != serves:
                    self.note(f"instance {instance.number} is restarted")
                    instance.die(silently=False)
                    instance.start(model=model)

    async def _befall(self, fault: faults.Any) -> None:
        await asyncio.sleep(fault.at_s)
        self.note(str(fault))
        await _BEFALLS[type(fault)](self, fault)

    async def _instance_dies(self, fault: faults.InstanceDies) -> None:
        instance = self.instances[fault.instance]
        instance.die(silently=fault.silently)
        if fault.model:
            await asyncio.sleep(fault.for_s / 2)
            instance.die(silently=False)
            instance.start(self._label(fault), fault.model)
            await asyncio.sleep(fault.for_s / 2)
            instance.die(silently=False)
        else:
            await asyncio.sleep(fault.for_s)
        if instance.server is None:
            self.note(f"instance {fault.instance} is back")
            instance.start(self._label(fault))

    def _label(self, fault: faults.InstanceDies) -> str:
        """The version of weights that are published by now: newer ones are refused permanently."""
        known = fault.label == "default" or int(fault.label) <= max(self.ledger.published)
        return fault.label if known else "default"

    async def _stands_still(self, fault: faults.InstanceStandsStill) -> None:
        instance = self.instances[fault.instance]
        server = instance.server
        if server is None or instance.process is None:
            return
        instance.process.start(server.engine.get_stuck())
        await asyncio.sleep(fault.for_s)
        if instance.server is server:
            instance.die(silently=False)
            instance.start()

    async def _is_slow(self, fault: faults.InstanceIsSlow) -> None:
        server = self.instances[fault.instance].server
        if server is None:
            return
        engine = server.engine
        engine.instance.clocked.set_speed(1 / fault.by)
        await asyncio.sleep(fault.for_s)
        engine.instance.clocked.set_speed(1.0)

    async def _lies(self, fault: faults.InstanceLies) -> None:
        server = self.instances[fault.instance].server
        if server is None:
            return
        board = server.switchboard
        board.set(
            fake.Fault(fault.kind, on=fault.on, probability=fault.share, seconds=fault.seconds)
        )
        await asyncio.sleep(fault.for_s)
        board.faults.pop(fault.kind, None)

    def _host(self, named: str) -> str:
        kind, _, number = named.partition(" ")
        hosts = self.trainers if kind == "trainer" else self.instances
        return hosts[int(number or 0)].host

    async def _link_is_cut(self, fault: faults.LinkIsCut) -> None:
        host = self._host(fault.host)
        self.network.cut(host, gateway.HOST)
        await asyncio.sleep(fault.for_s)
        self.network.mend(host, gateway.HOST)

    async def _connections_break(self, fault: faults.ConnectionsBreak) -> None:
        host = self._host(fault.host)
        self.network.reset(host, gateway.HOST)
        self.network.break_new(host, gateway.HOST, fault.share)
        await asyncio.sleep(fault.for_s)
        self.network.break_new(host, gateway.HOST, 0.0)

    async def _gateway_dies(self, fault: faults.GatewayDies) -> None:
        self.gateway.die(fault)

    async def _gateway_stops(self, fault: faults.GatewayStops) -> None:
        self.gateway.down_until = self.kernel.time() + fault.for_s
        await self.gateway.stop()

    async def _disk_is_full(self, fault: faults.DiskIsFull) -> None:
        self.gateway.set_disk(full=True)
        await asyncio.sleep(fault.for_s)
        self.gateway.set_disk(full=False)

    async def _disk_fails(self, fault: faults.DiskFails) -> None:
        self.gateway.set_disk(failing=True)
        await asyncio.sleep(fault.for_s)
        self.gateway.set_disk(failing=False)

    async def _trainer_dies(self, fault: faults.TrainerDies) -> None:
        self.trainers[fault.trainer].dies_at[fault.when] = fault

    async def _stale_publication(self, fault: faults.StalePublication) -> None:
        version = max(0, max(self.ledger.published) - fault.back)
        self.spawn("stranger", STRANGER).start(self._publish_again(version))

    async def _publish_again(self, version: int) -> None:
        client = TrainerClient(gateway.URL, None)
        await client.open()
        try:
            update = update_of(version, Reload("/", visible_here=False))
            await client.post("/rollout/v1/weights", update)
            self.note(f"version {version} was published by a stranger, first")
        except CallerError as error:
            self.note(f"version {version} is not published again: {error}")
        except GatewayError as error:
            self.note(f"nobody heard of version {version} again: {error}")
        finally:
            await client.close()

    async def _process_stands_still(self, fault: faults.ProcessStandsStill) -> None:
        kind, _, number = fault.process.partition(" ")
        who = self.gateway if kind == "gateway" else self.trainers[int(number)]
        process = who.process
        if process is not None:
            process.stop()
            await asyncio.sleep(fault.for_s)
            process.resume()

    async def _stranger_takes_batch(self, fault: faults.StrangerTakesBatch) -> None:
        self.spawn("stranger", STRANGER).start(self._take_batch(fault.acknowledges))

    async def _take_batch(self, acknowledges: bool) -> None:
        client = TrainerClient(gateway.URL, None)
        await client.open()
        held = min(self.ledger.held, default=None) if acknowledges else None
        name = "another stranger" if acknowledges else "a stranger"
        asked = {"trainer": name, "ack": held, "parts": False, "timeout_s": 1.0}
        try:
            status, _ = await client.post("/rollout/v1/batches/next", asked)
            self.note(f"the stranger has a batch: {status}")
        except LeaseEnded as error:
            self.note(f"the stranger is refused: {error}")
        except GatewayError as error:
            self.note(f"nobody heard of the stranger: {error}")
        finally:
            await client.close()

    async def _grader_is_away(self, fault: faults.GraderIsAway) -> None:
        """Does nothing: the prompts contain the times (`rewards.said_by_prompt`)."""

    async def _tokens_rot(self, fault: faults.TokensRot) -> None:
        self.note(f"rotten: {rot_tokens(*self._rot(fault), fault.share)}")

    async def _row_rots(self, fault: faults.RowRots) -> None:
        self.note(f"rotten: {fault.kind} {rot_row(*self._rot(fault), fault.kind)}")

    async def _log_rots(self, fault: faults.LogRots) -> None:
        self.gateway.damage_log(*self._rot(fault))

    def _rot(self, fault: faults.Fault) -> tuple[Path, Random]:
        """Kill the gateway. Returns its store, and random numbers for the damage."""
        self.gateway.die(faults.GatewayDies(at_s=fault.at_s, for_s=fault.for_s))
        return self.gateway.store, Random(f"rot/{self.plan.seed}/{fault.at_s}")


_BEFALLS: dict[type[Any], Callable[[World, Any], Coroutine[Any, Any, None]]] = {
    faults.InstanceDies: World._instance_dies,
    faults.InstanceStandsStill: World._stands_still,
    faults.InstanceIsSlow: World._is_slow,
    faults.InstanceLies: World._lies,
    faults.LinkIsCut: World._link_is_cut,
    faults.ConnectionsBreak: World._connections_break,
    faults.GatewayDies: World._gateway_dies,
    faults.GatewayStops: World._gateway_stops,
    faults.DiskIsFull: World._disk_is_full,
    faults.DiskFails: World._disk_fails,
    faults.TrainerDies: World._trainer_dies,
    faults.StalePublication: World._stale_publication,
    faults.ProcessStandsStill: World._process_stands_still,
    faults.StrangerTakesBatch: World._stranger_takes_batch,
    faults.GraderIsAway: World._grader_is_away,
    faults.TokensRot: World._tokens_rot,
    faults.RowRots: World._row_rots,
    faults.LogRots: World._log_rots,
}


def _prompts(plan: Plan) -> list[Prompt]:
    rng = Random(f"prompts/{plan.seed}")
    sampling = {"temperature": 0.0, "logprobs": 0}
    return [
        Prompt(
            f"p{number}",
            [number + 1, *(rng.randrange(1000) for _ in range(rng.randrange(40)))],
            plan.samples,
            plan.max_tokens,
            sampling,
            extra=_extra(plan, number),
        )
        for number in range(plan.groups)
    ]


def _extra(plan: Plan, number: int) -> dict[str, Any]:
    """The `extra` of a prompt, with the data for its tools and rewards."""
    rng = Random(f"extra/{plan.seed}/{number}")
    extra: dict[str, Any] = {}
    if plan.rewards is not None:
        away = [(f.at_s, f.over_s) for f in plan.faults if isinstance(f, faults.GraderIsAway)]
        extra |= rewards.said_by_prompt(plan.rewards, plan.samples, rng, away)
    if plan.tools is not None:
        extra |= tools.said_by_prompt(plan.tools, rng)
    return extra


class _Errors(logging.Handler):
    """Collects unexpected errors: records that are logged with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        # The soak's clients make a simulated server fail on purpose.
        if error and record.name != "aiohttp.server" and not isinstance(error, MEANT):
            self.seen.append(logging.Formatter().format(record))


def run(plan: Plan) -> Outcome:
    """Run a plan."""
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=_fast_disk()))
    kernel = Kernel()  # type: ignore[abstract]
    errors = _Errors()
    root = logging.getLogger()
    root.addHandler(errors)
    world: World | None = None
    broken = ""
    try:
        with simulated(kernel, plan.seed, lambda path: _disk(world, path)):
            world = World(plan, folder, kernel)
            try:
                kernel.run_until_complete(world.run())
            except LawBroken as error:
                broken = str(error)
            except Exception as error:
                broken = f"{type(error).__name__}: {error}\n{_traceback(error)}"
            calls = [(c.ended_s - c.began_s, c.came, c.answer) for c in world.calls]
            outcome = Outcome(
                plan, broken, world.journal, world.work, world.told(), calls, kernel.time()
            )
            _clean_up(world)
        if not broken and errors.seen:
            broken = f"an unexpected error was raised: {errors.seen[0]}"
        return msgspec.structs.replace(outcome, broken=broken)
    finally:
        root.removeHandler(errors)
        shutil.rmtree(folder, ignore_errors=True)


def _disk(world: World | None, folder: Path) -> Any:
    return world.gateway.disk_of(folder)


def _fast_disk() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _clean_up(world: World) -> None:
    """End every process and ignore what its tasks still log."""
    hook, said = sys.unraisablehook, logging.root.manager.disable
    sys.unraisablehook = lambda unraisable: None
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about coroutines that were never started
            kernel, processes = world.kernel, [*world.kernel.processes]
            for process in processes:
                process.kill()
            world.network.close()
            kernel.processes.clear()
            vars(world).clear()
            web_app._cached_build_middleware.cache_clear()  # it keeps whole applications
            for _ in range(COLLECTIONS):
                kernel.close()
                for process in processes:
                    process.forget()
                for task in asyncio.all_tasks(kernel):
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                gc.collect()
    finally:
        sys.unraisablehook = hook
        logging.disable(said)
