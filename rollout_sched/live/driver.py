"""The asyncio driver: turns the scheduler's actions into deeds, and what comes of them into events.

It decides nothing. Everything that happens is told to the scheduler as an event, one after the
other through one inbox; an attempt is under way until its payload says that it is over; a Wake is a
timer. It is the live twin of
`simulators.replay.closed_loop`: shown the same events, both do the same.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollout_sched.core.actions import (
    Action,
    Answer,
    Deliver,
    Discard,
    Dispatch,
    Interrupt,
    Pause,
    Release,
    Resume,
    UpdateWeights,
    Wake,
)
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import (
    Blame,
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstanceLeaving,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
    TokensArrived,
    WeightsPublished,
    Woke,
)
from rollout_sched.core.model import Sample
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live.attempts import Running
from rollout_sched.live.instance_supervisor import InstanceSupervisor
from rollout_sched.live.ports import (
    AnswerUntrue,
    ConnectionBroken,
    Description,
    InstanceClient,
    InstanceError,
    InstanceUnreached,
    Outcome,
    Payload,
    RequestRejected,
    WeightLoader,
    WeightsUnknown,
)
from rollout_sched.live.settings import DEFAULTS, Settings

log = logging.getLogger(__name__)

Observer = Callable[[float, Event, list[Action]], None]
#: Makes the payload of the sample with this index of a group.
PayloadFactory = Callable[[int], Payload]
#: Called with a delivered batch and the payloads of its samples, in their order.
OnDeliver = Callable[[Deliver, list[Payload]], None]
#: Called with a group that can never be whole, and why.
OnGroupFailed = Callable[[str, Exception | None], None]


class Driver:
    """One scheduler in front of a live fleet. Make it inside a running event loop.

    `now` counts from its making, in seconds of the loop's clock. Every observer sees every
    (now, event, actions): the journal and the metrics are such. One that raises is logged and
    hears no more, for a record with holes is worse than one that ends.

    `on_broken` is called once if the scheduler cannot go on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        settings: Settings = DEFAULTS,
        observers: Sequence[Observer] = (),
        on_deliver: OnDeliver | None = None,
        on_group_failed: OnGroupFailed | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.view = scheduler.view
        self.settings = settings
        self.observers = list(observers)
        self._watchers: dict[type[Any], list[Callable[[Any], None]]] = {}
        self.on_deliver = on_deliver
        self.on_group_failed = on_group_failed
        self.on_broken: Callable[[], None] | None = None
        self.supervisors: dict[str, InstanceSupervisor] = {}
        self.broken: Exception | None = None
        self.first_version = self.view.run.version
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._run_id = secrets.token_hex(4)
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._answers: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._requests = 0
        self._running: dict[int, Running] = {}
        self._payloads: dict[str, Payload] = {}
        self._factories: dict[str, PayloadFactory] = {}
        self._errors: dict[str, Exception] = {}
        self._loader: WeightLoader | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._anomalies = 0
        self._do: dict[type[Any], Callable[[Any], None]] = {
            Dispatch: self._dispatch,
            Interrupt: self._interrupt,
            Pause: self._pause,
            Resume: self._resume,
            Release: self._release,
            UpdateWeights: self._update_weights,
            Deliver: self._deliver,
            Answer: self._answer,
            Discard: self._discard,
            Wake: self._wake,
        }
        if settings.stream_s:
            self._loop.call_later(settings.stream_s, self._report_streams)

    @property
    def now(self) -> float:
        return self._loop.time() - self._origin

    # -- telling the scheduler -------------------------------------------------------------

    def watch(self, watcher: Callable[[Any], None], *kinds: type[Any]) -> None:
        """Have `watcher` called with every event of these types, before its actions are done."""
        for kind in kinds:
            self._watchers.setdefault(kind, []).append(watcher)

    def tell(self, event: Event) -> None:
        """Something has happened. Raises CallerError, and nothing has changed, if the caller asked
        for the impossible. A scheduler that is broken is told nothing more."""
        if self._handling:
            self._inbox.append(event)
            return
        self._handling = True
        try:
            self._handle(event)
            self._empty_inbox()
        finally:
            self._handling = False
        # Whoever is answered may ask again at once, which must not happen within an event.
        while self._answers:
            answer, arguments = self._answers.popleft()
            try:
                answer(*arguments)
            except Exception:
                log.exception("an answer could not be handed over")

    def _empty_inbox(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            try:
                self._handle(event)
            except CallerError as error:  # it is not the fault of whoever told the first event
                log.error("%s was refused: %s", event, error)

    def _handle(self, event: Event) -> None:
        if self.broken is not None:
            return
        now = self._loop.time() - self._origin
        try:
            actions = self.scheduler.handle(event, now)
        except CallerError:
            raise
        except Exception as error:
            self._break(error)
            return
        self._show(now, event, actions)
        try:
            for action in actions:
                self._do[type(action)](action)
        except Exception as error:
            self._break(error)
        anomalies = self.view.anomalies
        if anomalies and sum(anomalies.values()) != self._anomalies:
            self._anomalies = sum(anomalies.values())
            log.warning("%s does not fit what is known: %s", event, dict(anomalies))

    def _show(self, now: float, event: Event, actions: list[Action]) -> None:
        """To all who look on. Who fails at that changes nothing for anybody else."""
        for observer in self.observers:
            try:
                observer(now, event, actions)
            except Exception:
                log.exception("%r failed and is told nothing more", observer)
                self.observers = [other for other in self.observers if other is not observer]
        for watcher in self._watchers.get(type(event), ()):
            try:
                watcher(event)
            except Exception:
                log.exception("%r failed at %s", watcher, event)

    def _break(self, error: Exception) -> None:
        """The scheduler's own state can no longer be trusted: everybody who waits is told."""
        if self.broken is not None:
            return
        log.critical("the scheduler cannot go on", exc_info=error)
        self.broken = error
        for payload in self._payloads.values():
            self._answers.append((payload.fail, ("failed", error)))
        self._payloads.clear()
        if self.on_group_failed is not None:
            for group in self._factories:
                self._answers.append((self.on_group_failed, (group, error)))
        if self.on_broken is not None:
            self._answers.append((self.on_broken, ()))

    def _check_sound(self) -> None:
        if self.broken is not None:
            raise self.broken

    # -- what callers ask for --------------------------------------------------------------

    async def add_instance(
        self, client: InstanceClient, *, patient: bool = False
    ) -> Description | None:
        """Take an instance in. Raises CallerError or InstanceError if it cannot be used.

        With `patient` one that does not answer yet is None, and joins once it does.
        """
        if client.name in self.supervisors:
            raise CallerError(f"instance {client.name!r} is here already")
        supervisor = InstanceSupervisor(client, self)
        self.supervisors[client.name] = supervisor
        try:
            return await supervisor.start(patient=patient)
        except BaseException:
            del self.supervisors[client.name]
            await supervisor.close()
            raise

    async def remove_instance(self, name: str, *, drain: bool = False) -> None:
        """Let an instance go; what it holds moves on, or with `drain` is finished first."""
        supervisor = self._supervisor(name)
        if drain and supervisor.joined:
            self.tell(InstanceLeaving(name))
            await supervisor.membership.drained.wait()
        if self.supervisors.get(name) is not supervisor:
            return  # removed while it drained
        del self.supervisors[name]
        self.lose(name, "removed")
        await supervisor.remove()

    def submit_group(
        self, group: str, samples: int, prompt_tokens: int, max_tokens: int, make: PayloadFactory
    ) -> None:
        """Ask for a group; `make(index)` is called when a sample is first dispatched."""
        self._check_sound()
        if group in self._factories:
            raise CallerError(f"group {group!r} is already here; give each group its own id")
        self._factories[group] = make
        try:
            self.tell(GroupSubmitted(group, samples, prompt_tokens, max_tokens))
        except CallerError:
            del self._factories[group]
            raise

    def submit(
        self,
        payload: Payload,
        prompt_tokens: int,
        max_tokens: int,
        group: str = "",
        session: str = "",
    ) -> str:
        """Ask for one response, to be answered when it is finished; returns the request's id."""
        self._check_sound()
        self._requests += 1
        request = f"{self._run_id}.{self._requests}"
        self._payloads[request] = payload
        try:
            self.tell(
                RequestSubmitted(request, group or request, prompt_tokens, max_tokens, session)
            )
        except CallerError:
            del self._payloads[request]
            raise
        return request

    def withdraw(self, request: str) -> None:
        """The client of a submitted request has gone."""
        if request in self._payloads:
            self.tell(RequestWithdrawn(request))

    def publish(self, version: int, loader: WeightLoader) -> None:
        """New weights; `loader` brings them to each instance when its turn comes."""
        self._check_sound()
        before, self._loader = self._loader, loader
        try:
            self.tell(WeightsPublished(version))
        except CallerError:
            self._loader = before
            raise

    async def close(self) -> None:
        """Stop everything; instances are left as they are."""
        for running in self._running.values():
            running.end()
            running.cancel()
        self._running.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(asyncio.sleep(0), *self._tasks, return_exceptions=True)
        for supervisor in self.supervisors.values():
            await supervisor.close()

    def max_model_len(self) -> int:
        """Tokens of prompt and response that every instance here takes; 0 without instances."""
        known = (supervisor.description for supervisor in self.supervisors.values())
        return min((d.max_model_len for d in known if d is not None), default=0)

    # -- what supervisors say ---------------------------------------------------------------

    def join(self, name: str, description: Description) -> None:
        version = description.version
        if version is None or version > self.view.run.version:
            version = self.first_version
        self.tell(InstanceJoined(name, description.slots, description.kv_tokens, version))

    def lose(self, name: str, reason: str) -> None:
        """The instance is gone; what its streams brought is kept."""
        for running in self.holds(name):
            self._take(running)
            running.cancel()
            try:
                self._keep_streamed(running)
            except Exception as error:  # the payload's own
                self._tell_failed(running, error, usable=False)
        if self.view.instance(name) is not None:
            log.warning("instance %s lost: %s", name, reason)
            self.tell(InstanceLost(name, reason))

    def holds(self, name: str) -> Sequence[Running]:
        """The attempts under way on an instance."""
        instance = self.view.instance(name)
        attempts = () if instance is None else instance.attempts
        return [self._running[attempt] for attempt in attempts if attempt in self._running]

    async def answered(self, name: str) -> None:
        """Every attempt that was stopped there has answered, or was given up."""
        ends = {running.ended(): running for running in self.holds(name)}
        if not ends:
            return
        _, late = await asyncio.wait(ends, timeout=self.settings.abort_timeout_s)
        for end in late:
            self.forget(ends[end], "it did not stop")

    def stop(self, running: Running, reason: str) -> None:
        """Break off an attempt of which nothing more may come; it goes on from what it brings."""
        running.stopped = True
        log.warning("attempt %d on %s: %s", running.dispatch.attempt, running.client.name, reason)
        self._spawn(self._stop(running, reason))

    def forget(self, running: Running, reason: str) -> None:
        """Give up an attempt that the instance will never answer."""
        running.cancel()
        self._failed(running, InstanceError(f"given up: {reason}"))

    def disbelieve(self, running: Running) -> None:
        """Nothing that its stream has brought, if anything, is gone on from."""
        try:
            brought = running.payload.streamed(running.dispatch.attempt)
        except Exception as error:  # the payload's own: its attempt is of no use
            self._failed(running, error)
            return
        if brought:
            running.cancel()
            self._failed(running, WeightsUnknown("its instance was restarted before it began"))

    # -- attempts --------------------------------------------------------------------------

    def _dispatch(self, action: Dispatch) -> None:
        payload = self._payloads.get(action.request)
        if payload is None:
            try:
                payload = self._make(action)
            except Exception as error:  # the caller's own
                self._errors[action.request] = error
                self.tell(RequestFailed(action.request, action.attempt, str(error), "request"))
                return
        supervisor = self.supervisors[action.instance]
        order_id = f"{self._run_id}-{action.attempt}"
        running = Running(action, payload, supervisor.client, order_id, self._loop.time())
        self._running[action.attempt] = running
        if supervisor.health.verified.is_set():
            self._begin(running)
        else:
            self._spawn(self._begin_once_verified(running, supervisor))

    def _make(self, action: Dispatch) -> Payload:
        payload = self._factories[action.group](action.index)
        self._payloads[action.request] = payload
        return payload

    async def _begin_once_verified(self, running: Running, supervisor: InstanceSupervisor) -> None:
        await supervisor.health.verified.wait()
        if running.dispatch.attempt in self._running:
            self._begin(running)

    def _begin(self, running: Running) -> None:
        running.begun = self._loop.time()
        patience_s = self.settings.attempt_timeout_s
        if patience_s:
            reason = f"no answer within {patience_s:g} s"
            running.timer = self._loop.call_later(patience_s, self.forget, running, reason)
        try:
            running.attempting = running.payload.begin(
                running.client, running.dispatch, running.order_id, partial(self._over, running)
            )
        except (InstanceError, RequestRejected, OSError) as error:
            self._failed(running, error)
        except Exception as error:
            log.exception("attempt %d of request %s", running.dispatch.attempt, running.order_id)
            self._failed(running, RequestRejected(f"it cannot be sent: {error!r}", 500))

    def _over(self, running: Running, result: Outcome | Exception) -> None:
        if isinstance(result, Exception):
            running.cancel()
            self._failed(running, result)
        else:
            running.let_go()
            self._ended(running, result)

    def _ended(self, running: Running, outcome: Outcome) -> None:
        dispatch = running.dispatch
        if outcome.finish == "abort" and not outcome.tokens and not self._was_stopped(running):
            self._failed(running, InstanceError("aborted by the instance without a token"))
            return
        if not self._take(running):
            return
        kept = min(max(0, outcome.tokens), dispatch.max_new_tokens)
        try:
            running.payload.keep(dispatch.attempt, kept, outcome.piece)
        except Exception as error:  # the payload's own
            self._tell_failed(running, error, usable=False)
            return
        request, attempt = dispatch.request, dispatch.attempt
        if outcome.finish == "abort":
            self.tell(RequestInterrupted(request, attempt, outcome.tokens, outcome.spans))
        else:
            self.tell(
                RequestFinished(request, attempt, outcome.tokens, outcome.spans, outcome.finish)
            )

    def _failed(self, running: Running, error: Exception) -> None:
        if not self._take(running):
            return
        usable = not isinstance(error, AnswerUntrue)
        if usable:
            try:
                self._keep_streamed(running)
            except Exception as own:  # the payload's own
                error, usable = own, False
        self._tell_failed(running, error, usable=usable)

    def _tell_failed(self, running: Running, error: Exception, *, usable: bool) -> None:
        """An attempt that the driver holds no longer has failed."""
        dispatch = running.dispatch
        if not isinstance(error, InstanceError | RequestRejected | OSError):
            text = "attempt %d of request %s"
            log.error(text, dispatch.attempt, dispatch.request, exc_info=error)
        if not usable:
            _drop(running.payload, dispatch.attempt)
        self._errors[dispatch.request] = error
        log.info("attempt %d on %s failed: %s", dispatch.attempt, dispatch.instance, error)
        supervisor = self.supervisors.get(dispatch.instance)
        if supervisor is not None and _may_be_restarted(error):
            supervisor.health.check_now()  # first: its slot is given away as soon as this is told
        told = RequestFailed(dispatch.request, dispatch.attempt, str(error), _blame(error), usable)
        self.tell(told)

    def _take(self, running: Running) -> bool:
        """Let go of an attempt. False if that has happened: this is not its first end."""
        if self._running.pop(running.dispatch.attempt, None) is None:
            return False
        running.end()
        return True

    def _was_stopped(self, running: Running) -> bool:
        """An attempt that we stopped, alone or with its whole instance."""
        return running.stopped or self.view.is_stopping(running.dispatch.attempt)

    def _keep_streamed(self, running: Running) -> None:
        """The attempt broke off: what its stream has brought is all there will be."""
        self._report_stream(running)
        if running.told:
            attempt = running.dispatch.attempt
            piece = running.payload.partial(attempt, running.told)
            running.payload.keep(attempt, running.told, piece)

    def _report_stream(self, running: Running) -> None:
        dispatch = running.dispatch
        tokens = min(running.payload.streamed(dispatch.attempt), dispatch.max_new_tokens)
        if tokens > running.told:
            running.told = tokens
            self.tell(TokensArrived(dispatch.request, dispatch.attempt, tokens))

    def _report_streams(self) -> None:
        self._loop.call_later(self.settings.stream_s, self._report_streams)
        for running in list(self._running.values()):
            try:
                self._report_stream(running)
            except Exception as error:  # the payload's own: its attempt is of no use
                self._failed(running, error)

    def _interrupt(self, action: Interrupt) -> None:
        running = self._running.get(action.attempt)
        if running is not None:
            self._spawn(self._stop(running))

    async def _stop(self, running: Running, reason: str = "it did not stop") -> None:
        """An abort may overtake its order, so it is repeated until the answer has come."""
        deadline = self._loop.time() + self.settings.abort_timeout_s
        wait_s = 0.25
        while not running.ended().done():
            try:
                async with asyncio.timeout_at(deadline):
                    await running.client.abort(running.order_id)
            except Exception as error:  # whatever it is, the attempt must come to its end
                log.warning("abort of %s on %s: %r", running.order_id, running.client.name, error)
            await asyncio.wait({running.ended()}, timeout=wait_s)
            wait_s = min(2 * wait_s, 4.0)
            if self._loop.time() > deadline and not running.ended().done():
                self.forget(running, reason)
                return

    # -- the other actions -----------------------------------------------------------------

    def _pause(self, action: Pause) -> None:
        self._supervisor(action.instance).orders.pause(action.mode, action.clear_cache)

    def _resume(self, action: Resume) -> None:
        self._supervisor(action.instance).orders.resume()

    def _release(self, action: Release) -> None:
        self._supervisor(action.instance).membership.drained.set()

    def _update_weights(self, action: UpdateWeights) -> None:
        self._supervisor(action.instance).orders.update(action.version, self._loader)

    def _deliver(self, action: Deliver) -> None:
        payloads = [self._payloads.pop(sample.request) for sample in action.samples]
        for sample in action.samples:
            self._factories.pop(sample.group, None)
            self._errors.pop(sample.request, None)
        if self.on_deliver is not None:
            self._answers.append((self._hand_over_batch, (action, payloads)))

    def _hand_over_batch(self, action: Deliver, payloads: list[Payload]) -> None:
        assert self.on_deliver is not None
        try:
            self.on_deliver(action, payloads)
        except Exception as error:  # the samples are gone: the trainer must not wait for them
            self._break(error)

    def _answer(self, action: Answer) -> None:
        request = action.sample.request
        self._errors.pop(request, None)
        self._answers.append((_answer, (self._payloads.pop(request), action.sample)))

    def _discard(self, action: Discard) -> None:
        payload = self._payloads.get(action.request)
        if payload is not None:
            _drop(payload, action.attempt)
        if not action.ends:
            return
        self._payloads.pop(action.request, None)
        error = self._errors.pop(action.request, None)
        if action.reason == "oversized":
            error = RequestRejected("prompt and max_tokens fit into no instance's KV cache")
        if payload is not None and action.reason in ("failed", "withdrawn", "oversized"):
            reason = "withdrawn" if action.reason == "withdrawn" else "failed"
            self._answers.append((payload.fail, (reason, error)))
        if action.reason == "failed" and self._factories.pop(action.group, None) is not None:
            log.error("group %s failed: %s", action.group, error)
            if self.on_group_failed is not None:
                self._answers.append((self.on_group_failed, (action.group, error)))

    def _wake(self, action: Wake) -> None:
        self._loop.call_at(self._origin + action.at, self.tell, Woke())

    # -- inside ----------------------------------------------------------------------------

    def _supervisor(self, name: str) -> InstanceSupervisor:
        supervisor = self.supervisors.get(name)
        if supervisor is None:
            raise CallerError(f"no instance {name!r} here; there are {', '.join(self.supervisors)}")
        return supervisor

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _blame(error: Exception) -> Blame:
    """Whose fault an attempt's error is. Only what was never sent is surely the instance's."""
    if isinstance(error, RequestRejected):
        return "request"
    return "instance" if isinstance(error, InstanceUnreached) else "unclear"


def _may_be_restarted(error: Exception) -> bool:
    """Whether an attempt's error, or what it was rejected for, speaks for a restart."""
    if isinstance(error, RequestRejected):
        return isinstance(error.because, WeightsUnknown)
    return isinstance(error, ConnectionBroken | OSError | WeightsUnknown)


def _answer(payload: Payload, sample: Sample) -> None:
    """Whoever waits hears something, even where the answer cannot be put together."""
    try:
        payload.answer(sample)
    except Exception as error:
        log.exception("request %s was finished but could not be answered", sample.request)
        payload.fail("failed", error)


def _drop(payload: Payload, attempt: int) -> None:
    try:
        payload.drop(attempt)
    except Exception:  # it holds more than it should until it ends; nobody else is concerned
        log.exception("a payload could not let go of attempt %d", attempt)
