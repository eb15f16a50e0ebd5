"""The models that instances serve: `MODEL`, or by mistake another one."""

from __future__ import annotations

from benchmarks.soak.innocents import MODEL
from rollout_sched.simulators.fake_instance import tokens as text

OTHER = "another"

#: Both give the same context a response of the same name, but all tokens after that differ.
WORDS = {
    MODEL: text.LARGEST,
    OTHER: text.LARGEST._replace(first_word=text.LARGEST.first_word + 1),
}
