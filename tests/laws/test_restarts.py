"""Laws of a scheduler that may die at any time, in a hostile world and under any policy.

The world, its books and its laws are those of `test_scheduler_laws`, and continue across every
death: each requested group is delivered once, complete, in time, from all tokens that existed. In
addition:

* the fold of the recorded changes always equals the state;
* a restored scheduler has the state of the earlier one, except for instances;
* an answer to an attempt of the earlier scheduler changes nothing.
"""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.records import RunState
from rollout_sched.core.restart.facts import FactRecorder, FoldedFacts, state_of
from tests.laws.test_scheduler_laws import SLOTS, World


class MortalWorld(World):
    """A world whose scheduler sometimes dies and is replaced by another one."""

    recorder = None

    def tell(self, event):
        if self.recorder is None:
            self.record()
        super().tell(event)
        self.recorder.observe(self.now, event, self.answers[-1])
        if len(self.journal) % 3 == 0:
            self.look()

    def record(self):
        self.recorder, self.folded = FactRecorder(self.scheduler), FoldedFacts()

    def look(self):
        changes = self.recorder.changes()
        if changes is not None:
            self.folded.add(changes)
            assert self.folded.state == state_of(self.scheduler, self.now)

    @precondition(lambda self: len(self.journal) > 10)  # it has done something
    @rule(lag=st.integers(0, 2), again=st.booleans())
    def die(self, lag, again):
        self.be_followed(lag)
        if again:  # before anything else happens
            self.be_followed(lag)

    def be_followed(self, lag):
        self.look()
        state = msgspec.json.decode(msgspec.json.encode(self.folded.state), type=RunState)
        self.break_off()
        self.scheduler = self.policy.scheduler(
            self.prompts_per_step, version=self.first_version, seed=1
        )
        self.journal, self.answers = [], []
        self.record()
        staying = sorted(set(self.held) - self.leaving)
        self.held.clear()
        self.leaving.clear()
        self.tell(ev.Restored(state))
        for name in staying:
            self.held[name] = []
            self.tell(ev.InstanceJoined(name, SLOTS, 1000, self.version_of_a_newcomer(lag)))

    def break_off(self):
        """The results of attempts, orders and clients are lost."""
        for attempt, dispatch in self.running.items():
            known = self.scheduler.state.fleet.attempts[attempt]
            if known.request.resumable and not known.abandoned:
                self.made[dispatch.request] += self.streamed[attempt]
            self.over.append(ev.RequestFinished(dispatch.request, attempt, 1))
        for name in self.asked:
            self.ended[name] = 1
        self.running.clear()
        self.told_to_stop.clear()
        self.judging.clear()
        self.pausing.clear()
        self.updating.clear()
        self.closed_instances.clear()
        self.lent.clear()
        self.reclaimed.clear()
        self.shut.clear()


MortalWorld.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_mortal_world = MortalWorld.TestCase
