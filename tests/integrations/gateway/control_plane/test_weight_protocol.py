"""States and calls of an update that a trainer drives, without a gateway."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_sched.integrations.gateway.control_plane.weight_protocol import (
    BEGINS,
    MOVES,
    Conflict,
    Member,
    PartialUpdate,
    ProtocolStep,
    UpdateState,
    WeightProtocol,
)

A, B = Member("http://a:1", 1.0), Member("http://b:1", 1.0)
BOTH = [A, B]


def call(step: ProtocolStep) -> bytes:
    return step.encode()


def begun() -> WeightProtocol:
    protocol = WeightProtocol()
    assert not protocol.did(ProtocolStep.BEGIN, call(ProtocolStep.BEGIN), BOTH)
    return protocol


def half(protocol: WeightProtocol, step: ProtocolStep) -> WeightProtocol:
    protocol.half_did(step, PartialUpdate(call(step), f"/{step}", frozenset([A]), frozenset([B])))
    return protocol


def test_no_update_begins_within_another() -> None:
    steps = {
        ProtocolStep.BEGIN,
        ProtocolStep.DRAFT,
        ProtocolStep.LOAD,
        ProtocolStep.FINISH,
    }
    assert {state: set(moves) for state, moves in MOVES.items()} == {
        UpdateState.SETTLED: steps | {ProtocolStep.WHOLE},
        UpdateState.BEGUN: steps,
    }
    with pytest.raises(Conflict, match="finish it first"):
        begun().check(ProtocolStep.WHOLE, b"a checkpoint")


@pytest.mark.parametrize(
    "step", [ProtocolStep.BEGIN, ProtocolStep.LOAD, ProtocolStep.FINISH, ProtocolStep.WHOLE]
)
def test_a_call_that_is_half_done_goes_to_the_others_and_is_done_then(step: ProtocolStep) -> None:
    protocol = WeightProtocol() if step in (ProtocolStep.BEGIN, ProtocolStep.WHOLE) else begun()
    half(protocol, step)
    assert protocol.half_loaded
    assert (protocol.state is UpdateState.BEGUN) is (step is not ProtocolStep.WHOLE)
    protocol.check(step, call(step))
    assert protocol.pending(call(step), BOTH) == [B]
    loaded = protocol.did(step, call(step), BOTH)
    assert loaded is (step in (ProtocolStep.FINISH, ProtocolStep.WHOLE))
    assert protocol.half_done is None


def test_nothing_is_half_loaded_once_all_participants_left() -> None:
    protocol = begun()
    protocol.lost(A.name)
    assert protocol.half_loaded
    protocol.lost(B.name)
    assert not protocol.half_loaded


@pytest.mark.parametrize("first", [A, B])
def test_a_half_load_remains_while_a_participant_remains(first: Member) -> None:
    """The weights of who did it are new, and those of who failed are torn."""
    protocol = half(WeightProtocol(), ProtocolStep.WHOLE)
    protocol.lost(first.name)
    assert protocol.half_done is not None
    assert "send it again" in protocol.half_done.remedy
    (second,) = {A, B} - {first}
    protocol.lost(second.name)
    assert not protocol.half_loaded


def test_a_restart_undoes_an_instances_progress() -> None:
    protocol = WeightProtocol()
    protocol.half_did(
        ProtocolStep.LOAD, PartialUpdate(b"load", "/load", frozenset([B]), frozenset([A]))
    )
    assert protocol.pending(b"load", [A, Member(B.name, 2.0)]) == [A, Member(B.name, 2.0)]


class Server:
    """As much of vLLM as weights need: an update begins, loads and finishes, or is one call."""

    def __init__(self) -> None:
        self.served: tuple[int, ...] = ()
        self.started: ProtocolStep | None = None
        self.chunks: list[int] = []
        self.did: set[int] = set()

    def does(self, step: ProtocolStep, number: int) -> bool:
        """False if it refuses. No call that it has done may reach it again."""
        assert number not in self.did
        if step in BEGINS:
            if self.started:
                return False
            self.started, self.chunks = step, []
        elif step is ProtocolStep.WHOLE:
            self.served = (number,)
        elif not self.started:
            return False
        elif step is ProtocolStep.LOAD:
            self.chunks.append(number)
        else:
            if self.started is ProtocolStep.BEGIN:
                self.served = tuple(self.chunks)
            self.started = None
        self.did.add(number)
        return True


STEPS = st.sampled_from(
    [
        ProtocolStep.BEGIN,
        ProtocolStep.DRAFT,
        ProtocolStep.LOAD,
        ProtocolStep.LOAD,
        ProtocolStep.FINISH,
        ProtocolStep.WHOLE,
    ]
)
CALLS = st.lists(st.tuples(STEPS, st.booleans(), st.sets(st.integers(0, 2))), max_size=30)


def test_new_draft_weights_are_no_version() -> None:
    protocol = WeightProtocol()
    for begin in (ProtocolStep.DRAFT, ProtocolStep.BEGIN, ProtocolStep.DRAFT):
        for step in (begin, ProtocolStep.LOAD):
            assert not protocol.did(step, call(step), BOTH)
            assert protocol.half_loaded
        finish = ProtocolStep.FINISH
        assert protocol.did(finish, call(finish), BOTH) is (begin is ProtocolStep.BEGIN)


@example(
    [
        (ProtocolStep.WHOLE, False, {0}),
        (ProtocolStep.DRAFT, False, set()),
        (ProtocolStep.FINISH, False, set()),
    ]
)
@given(CALLS)
def test_loaded_versions_agree_after_any_failure(
    calls: list[tuple[ProtocolStep, bool, set[int]]],
) -> None:
    """A trainer that sends its last call again, or another, to servers any of which may fail."""
    servers = {Member(f"http://{name}:1", 1.0): Server() for name in "abc"}
    names = list(servers)
    protocol, last = WeightProtocol(), (ProtocolStep.BEGIN, 0)
    for number, (wanted, again, fails) in enumerate(calls, start=1):
        step, sent = last = last if again else (wanted, number)
        call = str(sent).encode()
        try:
            protocol.check(step, call)
        except Conflict:
            continue
        members = protocol.members(names, step)
        half = protocol.half_done
        if sent != number and (half is None or half.call != call):
            continue  # it was done, so sent again it would be another
        failed = [
            member
            for member in protocol.pending(call, members)
            if names.index(member) in fails or not servers[member].does(step, sent)
        ]
        if len(failed) == len(members) and step in BEGINS:
            continue  # all have refused to begin
        if failed:
            done = frozenset(members) - frozenset(failed)
            protocol.half_did(step, PartialUpdate(call, step, done, frozenset(failed)))
        else:
            loaded = protocol.did(step, call, members)
            assert not (loaded and protocol.half_loaded)
        if not protocol.half_loaded:
            assert len({server.served for server in servers.values()}) == 1
