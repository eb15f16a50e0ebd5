"""The models that instances serve: `MODEL`, or by mistake another one."""

from __future__ import annotations

from benchmarks.soak.innocents import MODEL
from rollout_sched.simulators.fake_instance import synthetic_tokens as text

OTHER = "another"

#: To the same context both give responses of the same name, in which every other token differs.
WORDS = {
    MODEL: text.LARGEST,
    OTHER: text.LARGEST._replace(first_word=text.LARGEST.first_word + 1),
}
