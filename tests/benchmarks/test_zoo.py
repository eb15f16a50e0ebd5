"""The zoo's page, from a small part of it."""

from __future__ import annotations

from pathlib import Path

from benchmarks import zoo


def test_a_part_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "zoo.md"
    zoo.main(
        "--traces lrm_math_open --scenarios qwen7b-8xh100 --policies tail_batching --draws 0 "
        f"--jobs 1 --kept {tmp_path / 'runs'} --out {page}".split()
    )
    lines = page.read_text().splitlines()
    table = lines.index("## lrm_math_open on qwen7b-8xh100")
    rows = [line.split(" | ") for line in lines[table + 4 : table + 6]]
    assert [row[0] for row in rows] == ["| round_robin_sync", "| tail_batching!"]
    assert rows[0][1:3] == ["1.00x", "1.00x"]
    assert rows[0][5:8] == ["1.000", "1.00", "1.00"]
    assert float(rows[1][5]) < 0.99
    assert any(line.startswith("* **tail_batching** (RollPacker") for line in lines)
