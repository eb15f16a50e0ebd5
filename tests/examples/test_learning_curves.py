"""The curves as they are shown."""

from __future__ import annotations

from xml.etree import ElementTree

from examples.learning_curves import HEIGHT, MARGIN, WIDTH, Point, svg, table

NAMESPACE = "{http://www.w3.org/2000/svg}"
CURVES = {
    "one": [Point(float(n + 1), 10 * (n + 1), n / 4) for n in range(5)],
    "<two>": [Point(2.0, 10, 1.0)],
}


def test_the_table_has_the_first_and_the_last_step() -> None:
    lines = table(CURVES, rows=3).splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
        ["one", "1", "1.0", "10", "0.000"],
        ["one", "3", "3.0", "30", "0.500"],
        ["one", "5", "5.0", "50", "1.000"],
        ["<two>", "1", "2.0", "10", "1.000"],
    ]
    assert lines[3].endswith("#" * 30)


def test_the_picture_has_a_line_for_each_policy_in_both_panels() -> None:
    root = ElementTree.fromstring(svg(CURVES, "a & b"))
    lines = root.findall(f"{NAMESPACE}polyline")
    assert len(lines) == 4
    texts = [text.text for text in root.iter(f"{NAMESPACE}text")]
    assert {"a & b", "one", "<two>", "5 seconds", "50 samples"} <= set(texts)


def test_rewards_stand_between_the_frames_edges() -> None:
    root = ElementTree.fromstring(svg(CURVES, "t"))
    by_time = root.findall(f"{NAMESPACE}polyline")[0]
    points = [tuple(map(float, pair.split(","))) for pair in by_time.attrib["points"].split()]
    assert points[0] == (MARGIN + WIDTH / 5, MARGIN + HEIGHT), "reward 0, a fifth of the time"
    assert points[-1] == (MARGIN + WIDTH, MARGIN), "reward 1, at the end"
