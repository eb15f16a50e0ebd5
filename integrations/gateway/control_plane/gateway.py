"""The object that all routes use: the running scheduler, the data plane, the instances by name."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.auth import AllowList, checked_url, id_of
from rollout_sched.integrations.gateway.control_plane.counts import LiveMetrics
from rollout_sched.integrations.gateway.control_plane.fanout import shipped
from rollout_sched.integrations.gateway.control_plane.trainer_updates import TrainerUpdates
from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.integrations.gateway.data_plane.reply import Responses
from rollout_sched.integrations.vllm.weight_updates import Transfer, WeightLoaders, WeightUpdate
from rollout_sched.integrations.vllm.weights import WeightRoots
from rollout_sched.live import LiveScheduler
from rollout_sched.live.instances import InstanceSupervisor
from rollout_sched.live.ports import InstanceClient

_ONE_SLASH = re.compile(r"^(https?:)/(?!/)")


class NoSuchInstance(CallerError):
    """No instance has this id or name."""


class NewInstance(msgspec.Struct, frozen=True):
    """An instance to add; other fields, as in other routers' calls, are ignored.

    slots      requests it runs at once, if it does not report them (vLLM's --max-num-seqs)
    kv_tokens  tokens of its KV cache, if it does not report them
    api_key    its own key; otherwise the key that the gateway's file has for it
    patient    whether it may start later
    labels     by them weights are loaded (`by_label` of an update)
    """

    url: str
    slots: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    kv_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None = None
    api_key: str | None = None
    patient: bool = False
    labels: dict[str, str] = {}


class InstanceView(msgspec.Struct, frozen=True):
    """An instance as administrators see it.

    status    as in `core.model.InstanceStatus`, or "away": not joined, `reason` says why
    held      paused by an administrator
    notes     features that it lacks, with the remedy
    """

    id: str
    url: str
    status: str
    reason: str
    held: bool
    leaving: bool
    version: int | None
    in_flight: int
    slots: int
    kv_tokens: int
    max_model_len: int
    model: str
    precision: str
    capabilities: list[str]
    notes: list[str]
    running: int | None
    waiting: int | None
    kv_usage: float | None
    generated_tokens: int | None
    draft_acceptance: float | None


MakeClient = Callable[[NewInstance], InstanceClient]


class Gateway:
    """`make_client` makes the client of an instance that is added at run time, if `allow` permits
    it; weights on disk must lie within `weight_roots`.

    figures      the counts of the run
    responses    how calls of the control plane ended; the data plane has its own
    lists_itself as one of the servers, for trainers that abort at each
    turned_away  requests that the HTTP server itself has refused, by status
    """

    def __init__(
        self,
        live: LiveScheduler,
        data_plane: DataPlane,
        make_client: MakeClient,
        allow: AllowList | None = None,
        weight_roots: WeightRoots | None = None,
        responses: Responses | None = None,
        *,
        lists_itself: bool = False,
    ) -> None:
        self._live = live
        self.lists_itself = lists_itself
        self._allow = allow or AllowList()
        self.policy = live.policy
        self.driver = live.driver
        self.trainer = live.trainer
        self.journal = live.records.journal
        self.data_plane = data_plane
        self._weight_roots = weight_roots or WeightRoots()
        self._weight_loaders = WeightLoaders(live.driver, self._weight_roots)
        self._weight_loaders.restore(live.records.weights)
        self.trainer_updates = TrainerUpdates(live.driver)
        self.figures = LiveMetrics(live.driver)
        self.responses = responses or Responses()
        self.turned_away: Mapping[int, int] = {}
        self.leaving = False  # it takes calls, but stops soon
        self.created = int(time.time())
        self._make_client = make_client

    @property
    def healthy(self) -> bool:
        """Whether a load balancer should send requests: they would be processed now."""
        works = self.driver.broken is None and not self.leaving
        return works and bool(self.driver.view.instances)

    def supervisors(self) -> list[InstanceSupervisor]:
        return list(self.driver.supervisors.values())

    def supervisor(self, id_or_url: str) -> InstanceSupervisor:
        """Raises NoSuchInstance."""
        # In a path "//" may have become "/": vllm-router's clients send http%3A/host%3Aport.
        url = _ONE_SLASH.sub(r"\1//", checked_url(id_or_url)).rstrip("/")
        for name, supervisor in self.driver.supervisors.items():
            if url in (name, id_of(name)):
                return supervisor
        known = ", ".join(self.driver.supervisors) or "none"
        raise NoSuchInstance(f"no instance {id_or_url!r}; known instances: {known}")

    async def add(self, new: NewInstance) -> InstanceSupervisor:
        """Raises CallerError if it was added before or is not usable, NotAllowed, or InstanceError
        if it is not up."""
        self._allow.check(checked_url(new.url))
        client = self._make_client(new)
        await self.driver.add_instance(client, patient=new.patient)
        return self.driver.supervisors[client.name]

    async def remove(self, id_or_url: str, *, drain: bool = False) -> None:
        """Raises NoSuchInstance."""
        await self.driver.remove_instance(self.supervisor(id_or_url).name, drain=drain)

    async def resolve_paths(self, method: str, path: str, query: str, body: bytes) -> bytes:
        """The body of a call with resolved paths. Raises CallerError if it names weights outside of
        the allowed folders."""
        fields = shipped().path_fields(method, path, body)
        return await self._weight_roots.resolve_call(query, body, fields)

    async def publish(self, update: WeightUpdate) -> None:
        """Raises CallerError if the version does not increase, or the weights are missing."""
        if self._weight_roots.known:
            transfer = await self._resolved(update.transfer)
            ways = {
                label: msgspec.structs.replace(way, transfer=await self._resolved(way.transfer))
                for label, way in update.by_label.items()
            }
            update = msgspec.structs.replace(update, transfer=transfer, by_label=ways)
        await self._weight_loaders.publish(update, self.trainer.weights, wait=update.wait)

    async def _resolved(self, transfer: Transfer | None) -> Transfer | None:
        if transfer is None:
            return None
        told = await self._weight_roots.resolve_call("", msgspec.json.encode(transfer))
        return msgspec.json.decode(told, type=Transfer)

    def view(self, supervisor: InstanceSupervisor) -> InstanceView:
        instance = self.driver.view.instance(supervisor.name)
        told, gauges = supervisor.description, supervisor.health.gauges
        return InstanceView(
            id=id_of(supervisor.name),
            url=supervisor.name,
            status="away" if instance is None else str(instance.status),
            reason=supervisor.reason,
            held=supervisor.control.held,
            leaving=instance is not None and instance.leaving,
            version=None if instance is None else instance.version,
            in_flight=0 if instance is None else instance.in_flight,
            slots=told.slots if told else 0,
            kv_tokens=told.kv_tokens if told else 0,
            max_model_len=told.max_model_len if told else 0,
            model=told.model if told else "",
            precision=told.precision if told else "",
            capabilities=sorted(told.capabilities) if told else [],
            notes=notes_of(supervisor),
            running=gauges.running if gauges else None,
            waiting=gauges.waiting if gauges else None,
            kv_usage=gauges.kv_usage if gauges else None,
            generated_tokens=gauges.generated_tokens if gauges else None,
            draft_acceptance=supervisor.health.drafts.recent if gauges else None,
        )

    def state(self) -> dict[str, Any]:
        """The state of the scheduler, the clients' calls, and a trainer's update through the
        gateway."""
        calls = {
            "open": self.data_plane.calls.open.requests,
            "open_bytes": self.data_plane.calls.open.body_bytes,
            "refused": self.data_plane.refused,
        }
        update = self.trainer_updates.state()
        return {**self._live.state(), "calls": calls, "trainer_update": update}


def notes_of(supervisor: InstanceSupervisor) -> list[str]:
    """The features that the instance lacks, as found when it was asked; empty if not checked."""
    if supervisor.description is None:
        return []
    return list(getattr(getattr(supervisor.client, "findings", None), "notes", ()))
