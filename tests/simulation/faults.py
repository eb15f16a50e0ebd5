"""The faults of a run, as data: drawn from the seed, printed, and removed one by one by shrinking.

By `Plan.calm_s` everything broken is repaired and everything away is back, except for processes
that die at their next action. From then on all work must end within a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import msgspec

from rollout_sched.live.trainer.records import DELIVERED, GROUP, PROMPT, REWARD
from rollout_sched.simulators.fake_instance import engine as fake
from tests.simulation.models import OTHER

if TYPE_CHECKING:
    from tests.simulation.plan import Plan

Power = Literal["kept", "all", "dice"]

#: What unsynced data a machine may lose with its power.
POWERS: tuple[Power, ...] = get_args(Power)

#: Wrong or missing answers of an instance; "restart" and the weight calls have their own faults.
LIES: tuple[fake.Kind, ...] = (
    "silent",
    "garbage",
    "twice",
    "another",
    "unfinished",
    "wrong_version",
    "error_503",
    "reset",
    "cut",
    "slow",
    "error_500",
)

Moment = Literal["received", "trained", "published", "asking"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A fault that starts at `at_s` seconds and in most cases lasts `for_s` seconds."""

    at_s: float
    for_s: float = 0.0

    text: ClassVar[str]  #: a format of the fields

    @property
    def over_s(self) -> float:
        return self.at_s + self.for_s

    def __str__(self) -> str:
        return f"t={self.at_s:.3f} {self.told}" + (f" for {self.for_s:.3f} s" * bool(self.for_s))

    @property
    def told(self) -> str:
        return self.text.format_map(msgspec.structs.asdict(self))


class InstanceDies(Fault, frozen=True):
    """It returns with an empty KV cache and the weights of its start, or with `label`. `silently`:
    its machine dies, too, and sends nothing. `model`: what it serves for half of the time
    meanwhile."""

    instance: int
    label: str = "default"
    silently: bool = False
    model: str = ""

    @property
    def told(self) -> str:
        how = " silently" * self.silently
        back = f", and comes back with weights {self.label}"
        return f"instance {self.instance} dies{how}{back}" + f" as {self.model}" * bool(self.model)


class InstanceStandsStill(Fault, frozen=True):
    """Its engine generates no tokens, but its HTTP server still answers; at the end it restarts."""

    instance: int

    text: ClassVar[str] = "instance {instance} stands still"


class InstanceIsSlow(Fault, frozen=True):
    instance: int
    by: float

    text: ClassVar[str] = "instance {instance} is {by:g} times slower"


class InstanceLies(Fault, frozen=True):
    instance: int
    kind: fake.Kind
    on: fake.Where
    share: float
    seconds: float

    text: ClassVar[str] = "instance {instance}: {kind} in {share:g} of its {on} calls"


class LinkIsCut(Fault, frozen=True):
    """The link between the gateway and another host is cut; nothing is lost or reported."""

    host: str

    text: ClassVar[str] = "the link between {host} and the gateway is cut"


class ConnectionsBreak(Fault, frozen=True):
    """All open connections break, and a share of those that are opened meanwhile."""

    host: str
    share: float

    text: ClassVar[str] = "connections with {host} break, and {share:g} of the new ones"


class GatewayDies(Fault, frozen=True):
    """`writes`: it dies only before this number of further disk writes. `power`: which data of the
    disk is lost, if the machine loses power."""

    writes: int = 0
    power: Power | None = None

    @property
    def told(self) -> str:
        when = f" at its write number {self.writes} from then on" * bool(self.writes)
        return f"the gateway dies{when}" + f", power lost ({self.power})" * bool(self.power)


class GatewayStops(Fault, frozen=True):
    text: ClassVar[str] = "the gateway is stopped cleanly"


class DiskIsFull(Fault, frozen=True):
    text: ClassVar[str] = "the gateway's disk is full"


class DiskFails(Fault, frozen=True):
    text: ClassVar[str] = "the gateway's disk fails"


class TrainerDies(Fault, frozen=True):
    """It dies after its next action and continues from its checkpoint."""

    when: Moment
    trainer: int = 0

    text: ClassVar[str] = "trainer {trainer} dies as soon as it has {when}"


class StalePublication(Fault, frozen=True):
    """A stranger publishes an old version again."""

    back: int

    text: ClassVar[str] = "the version published {back} before the last is published again"


class ProcessStandsStill(Fault, frozen=True):
    """The whole process stops, as by SIGSTOP, and later continues as if no time had passed."""

    process: str

    text: ClassVar[str] = "the process of the {process} stands still"


class StrangerTakesBatch(Fault, frozen=True):
    """A stranger asks for a batch once and then disappears. If `acknowledges`, it also acknowledges
    a batch that it does not have."""

    acknowledges: bool

    @property
    def told(self) -> str:
        how = "after another's batch" if self.acknowledges else "and disappears"
        return f"a stranger asks for a batch, {how}"


class TokensRot(Fault, frozen=True):
    """The gateway dies, and when it restarts, a share of the token pieces on its disk is damaged,
    at least one."""

    share: float

    text: ClassVar[str] = "the gateway dies, and {share:g} of the tokens on its disk rot"


class RowRots(Fault, frozen=True):
    """The gateway dies, and when it restarts, one fact of this kind on its disk is damaged."""

    kind: str

    text: ClassVar[str] = "the gateway dies, and a {kind} rots on its disk"


class LogRots(Fault, frozen=True):
    """The gateway dies, and the log on its disk is damaged anywhere."""

    text: ClassVar[str] = "the gateway dies, and the log on its disk rots"


class GraderIsAway(Fault, frozen=True):
    """No reward can be computed."""

    text: ClassVar[str] = "the grader is away"


Any = (
    InstanceDies
    | InstanceStandsStill
    | InstanceIsSlow
    | InstanceLies
    | LinkIsCut
    | ConnectionsBreak
    | GatewayDies
    | GatewayStops
    | DiskIsFull
    | DiskFails
    | TrainerDies
    | StalePublication
    | ProcessStandsStill
    | StrangerTakesBatch
    | GraderIsAway
    | TokensRot
    | RowRots
    | LogRots
)


def draw(rng: Random, calm_s: float, instances: int, *, power: bool) -> list[Any]:
    """A random number of faults of random kinds. `power`: whether the gateway's machine may lose
    power."""
    number = rng.choice((0, 1, 1, 2, 3, 4, 6, 9, 14))
    kinds = rng.sample(list(_KINDS), rng.randint(1, len(_KINDS)))  # a run has its own mixture
    found = [_KINDS[rng.choice(kinds)](rng, calm_s, instances, power) for _ in range(number)]
    return sorted(found, key=lambda fault: fault.at_s)


def draw_more(rng: Random, plan: Plan) -> list[Any]:
    """Faults of parts that not every run has, and of publications."""
    befall: list[Callable[[Random, Plan], Any]] = [_published_again, _stands_still]
    if plan.trainers > 1:
        befall += [_other_trainer_dies, _other_trainer_is_cut_off]
    if plan.lease_s:
        befall.append(_stranger)
    if plan.rewards is not None:
        befall.append(_grader)
    number = rng.choice((1, 2, 4, 6) if plan.lease_s else (0, 0, 1, 2, 4))
    return [rng.choice(befall)(rng, plan) for _ in range(number)]


def draw_even_more(rng: Random, plan: Plan) -> list[Any]:
    """Faults of a third trainer, and damage on the disk when a gateway restarts."""
    third: list[Callable[[Random, Plan], Any]] = [
        _other_trainer_dies,
        _other_trainer_is_cut_off,
        _stands_still,
    ]
    befall = [rng.choice(third) for _ in range(rng.randrange(3))] if plan.trainers > 2 else []
    if rng.random() < 0.2:
        befall += [_rots] * rng.randint(1, 2)
    rows = Random(f"rows/{plan.seed}")
    if rows.random() < 0.1:
        befall += [partial(_row_rots, rows)] * rows.randint(1, 2)
    logs = Random(f"logs/{plan.seed}")
    if logs.random() < 0.1:
        befall += [partial(_log_rots, logs)] * logs.randint(1, 2)
    return [one(rng, plan) for one in befall]


def _span(rng: Random, calm_s: float, max_s: float) -> dict[str, float]:
    at_s = rng.uniform(0, calm_s)
    return {"at_s": round(at_s, 3), "for_s": round(min(rng.uniform(0, max_s), calm_s - at_s), 3)}


def _host(rng: Random, instances: int) -> str:
    return rng.choice(["trainer", *(f"instance {k}" for k in range(instances))])


def _dies(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    return InstanceDies(
        **_span(rng, calm_s, 8),
        instance=rng.randrange(instances),
        label=rng.choice(["default", "default", "0", "1"]),
        silently=rng.random() < 0.3,
        model=rng.choice(["", "", "", OTHER]),
    )


def _stands(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    return InstanceStandsStill(**_span(rng, calm_s, 15), instance=rng.randrange(instances))


def _slow(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    by = rng.choice([3.0, 10.0, 100.0])
    return InstanceIsSlow(**_span(rng, calm_s, 10), instance=rng.randrange(instances), by=by)


def _lies(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    kind: fake.Kind = rng.choice(LIES)
    where: list[fake.Where] = ["generate", "generate", "weights", "control", "all"]
    return InstanceLies(
        **_span(rng, calm_s, 10),
        instance=rng.randrange(instances),
        kind=kind,
        on=rng.choice(where),
        share=rng.choice([0.1, 0.5, 1.0]),
        seconds=round(rng.uniform(0.1, 20), 3),
    )


def _cut(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    return LinkIsCut(**_span(rng, calm_s, 12), host=_host(rng, instances))


def _break(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    share = rng.choice([0.0, 0.3, 0.8])
    return ConnectionsBreak(**_span(rng, calm_s, 6), host=_host(rng, instances), share=share)


def _gateway(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    return GatewayDies(
        **_span(rng, calm_s, 6),
        writes=rng.choice([0, rng.randrange(1, 8), rng.randrange(1, 60)]),
        power=rng.choice([None, *POWERS]) if power else None,
    )


def _stops(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    return GatewayStops(**_span(rng, calm_s, 6))


def _full(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    return DiskIsFull(**_span(rng, calm_s, 10))


def _fails(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    return DiskFails(**_span(rng, calm_s, 2))


def _trainer(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    return TrainerDies(**_span(rng, calm_s, 6), when=rng.choice(MOMENTS))


def _stale(rng: Random, calm_s: float, instances: int, power: bool) -> Any:
    return StalePublication(at_s=round(rng.uniform(0, calm_s), 3), back=rng.randrange(3))


def _published_again(rng: Random, plan: Plan) -> Any:
    at_s = round(rng.uniform(0, plan.horizon_s), 3)
    return StalePublication(at_s=at_s, back=rng.choice([0, 0, 1, 2]))


def _stands_still(rng: Random, plan: Plan) -> Any:
    who = ["gateway"] if plan.in_process else ["gateway", *_trainers(plan)]
    span = _span(rng, plan.horizon_s, 6 + 2 * plan.lease_s)
    return ProcessStandsStill(**span, process=rng.choice(who))


def _trainers(plan: Plan) -> list[str]:
    return [f"trainer {number}" for number in range(plan.trainers)]


def _other_trainer_dies(rng: Random, plan: Plan) -> Any:
    span = _span(rng, plan.horizon_s, 6 + 2 * plan.lease_s)
    return TrainerDies(**span, when=rng.choice(MOMENTS), trainer=rng.randrange(1, plan.trainers))


def _other_trainer_is_cut_off(rng: Random, plan: Plan) -> Any:
    """It is cut off for so long that its lease ends."""
    span = _span(rng, plan.horizon_s, 6 + 2 * plan.lease_s)
    return LinkIsCut(**span, host=f"trainer {rng.randrange(1, plan.trainers)}")


def _stranger(rng: Random, plan: Plan) -> Any:
    at_s = round(rng.uniform(0, plan.horizon_s), 3)
    return StrangerTakesBatch(at_s=at_s, acknowledges=rng.random() < 0.5)


def _rots(rng: Random, plan: Plan) -> Any:
    return TokensRot(**_span(rng, plan.horizon_s, 4), share=rng.choice([0.0, 0.2, 1.0]))


def _log_rots(logs: Random, rng: Random, plan: Plan) -> Any:
    return LogRots(**_span(logs, plan.horizon_s, 4))


def _row_rots(rows: Random, rng: Random, plan: Plan) -> Any:
    kinds = [GROUP, PROMPT, DELIVERED, *([REWARD] if plan.rewards else [])]
    return RowRots(**_span(rows, plan.horizon_s, 4), kind=rows.choice(kinds))


def _grader(rng: Random, plan: Plan) -> Any:
    return GraderIsAway(**_span(rng, plan.horizon_s, 10))


_KINDS = {
    kind.__name__: draw_one
    for kind, draw_one in (
        (InstanceDies, _dies),
        (InstanceStandsStill, _stands),
        (InstanceIsSlow, _slow),
        (InstanceLies, _lies),
        (LinkIsCut, _cut),
        (ConnectionsBreak, _break),
        (GatewayDies, _gateway),
        (GatewayStops, _stops),
        (DiskIsFull, _full),
        (DiskFails, _fails),
        (TrainerDies, _trainer),
        (StalePublication, _stale),
    )
}
