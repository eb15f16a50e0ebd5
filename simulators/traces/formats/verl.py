"""verl's rollout dumps: texts, whose tokens we count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rollout_sched.simulators.traces.model import COUNTED_BY, Counting, SampleRecord, Turn
from rollout_sched.simulators.traces.rows import Importer, Placed, Row


def _convert(rows: Iterable[Row], counting: Counting) -> Placed:
    """{"input", "output" [, "uid", "step", "score", ...]}: verl's rollout dump.

    Group: the uid if there is one, else equal inputs within a step. The texts are dropped; step,
    score and the way of counting become labels.
    """
    names: dict[tuple[str, str], str] = {}
    members: Counter[str] = Counter()
    for row in rows:
        step = row.text("step") if "step" in row.fields else "0"
        if "uid" in row.fields:
            group = row.text("uid")
        else:
            key = (step, row.text("input"))
            group = names.setdefault(key, f"step{step}-prompt{len(names)}")
        prompt, output = counting(row.text("input")), counting(row.text("output"))
        labels = {k: row.text(k) for k in ("step", "score") if row.fields.get(k) is not None}
        labels[COUNTED_BY] = counting.label
        index = members[group]
        members[group] += 1
        sample = SampleRecord(
            group, index, prompt, (Turn(output),), finish="unknown", labels=labels
        )
        yield row.place, sample


VERL = Importer("verl rollout dump", frozenset({"input", "output"}), _convert)
