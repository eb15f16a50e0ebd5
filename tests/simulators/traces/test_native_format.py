"""The native format, line by line: what is refused, and with which words."""

import gzip
from pathlib import Path

import pytest

from rollout_sched.simulators.traces import TraceError, read

HEADER = '{"schema":"rollout-sched-trace/1","name":"tiny","max_response_tokens":100}'
GOOD = '{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7]]}'


def native(folder: Path, *lines: str) -> Path:
    path = folder / "tiny.jsonl"
    path.write_text("\n".join((HEADER, *lines)) + "\n")
    return path


class TestRefusing:
    @pytest.mark.parametrize(
        ("line", "field", "found"),
        [
            ('{"group":"a","sample":0,"turns":[[7]]}', "prompt_tokens", "missing required"),
            (
                '{"group":"a","sample":0,"prompt_tokens":0,"turns":[[7]]}',
                "prompt_tokens",
                "found 0",
            ),
            (
                '{"group":"a","sample":0,"prompt_tokens":5,"turns":[[-7]]}',
                "turns[0][0]",
                "found -7",
            ),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7.5]]}', "turns[0][0]", "7.5"),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[]}', "turns", "found []"),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7,1]]}', "turns", "last turn"),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7,0,NaN],[1]]}', "", "NaN"),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7,0,-1],[1]]}', "[0][2]", "-1"),
            ('{"group":1,"sample":0,"prompt_tokens":5,"turns":[[7]]}', "group", "found 1"),
            ('{"group":"a","sample":true,"prompt_tokens":5,"turns":[[7]]}', "sample", "True"),
            (
                '{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7]],"x":1}',
                "x",
                "unknown field",
            ),
            ('{"group":"a","sample":0,"prompt_tokens":5,"turns":[[1e12]]}', "turns[0][0]", "found"),
            (
                '{"group":"a","sample":0,"prompt_tokens":5,"turns":[[7]],"finish":"x"}',
                "finish",
                "x",
            ),
            ('{"group":"a","sample":0,"prompt', "", "malformed JSON"),
            ("[1, 2]", "", "found [1, 2]"),
            (GOOD, "sample", "appears twice"),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, line: str, field: str, found: str) -> None:
        path = native(tmp_path, GOOD, line)
        with pytest.raises(TraceError) as caught:
            read(path)
        error = caught.value
        assert (error.where, error.line) == (str(path), 3)
        assert field in error.field
        assert found in str(error)
        assert error.remedy
        assert "$" not in str(error)

    def test_a_journal_says_how_it_becomes_a_trace(self, tmp_path: Path) -> None:
        path = tmp_path / "run.journal"
        path.write_text('{"schema":"rollout-sched-journal/2","policy":"dplb"}\n')
        with pytest.raises(TraceError, match="rollout-sched journal trace JOURNAL --out"):
            read(path)

    def test_another_schema_version_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "new.jsonl"
        path.write_text('{"schema":"rollout-sched-trace/2"}\n')
        with pytest.raises(TraceError, match=r"field 'schema'.*rollout-sched-trace/2.*upgrade"):
            read(path)

    def test_an_unknown_header_field(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('{"schema":"rollout-sched-trace/1","nmae":"x"}\n')
        with pytest.raises(TraceError, match=r"field 'nmae'.*fields are schema, name"):
            read(path)

    def test_an_unknown_field_that_is_long_is_told_in_short(self, tmp_path: Path) -> None:
        path = native(tmp_path, GOOD[:-1] + ',"' + "x" * 5000 + '":1}')
        with pytest.raises(
            TraceError, match=r"field 'x+\.\.\.'.*unknown field `x+\.\.\.`"
        ) as caught:
            read(path)
        assert len(str(caught.value)) < 500

    @pytest.mark.parametrize("content", [b"", b"\n\n", HEADER.encode()])
    def test_an_empty_file_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "empty.jsonl"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"empty|no samples"):
            read(path)

    def test_wrong_encoding_names_the_line(self, tmp_path: Path) -> None:
        path = tmp_path / "latin.jsonl"
        path.write_bytes(HEADER.encode() + b'\n{"group":"\xe4"}\n')
        with pytest.raises(TraceError, match=r"line 2: byte 0xe4 .* UTF-8"):
            read(path)

    def test_a_cut_off_gzip(self, tmp_path: Path) -> None:
        path = tmp_path / "cut.jsonl.gz"
        path.write_bytes(gzip.compress(f"{HEADER}\n{GOOD}\n".encode())[:-12])
        with pytest.raises(TraceError, match="damaged gzip"):
            read(path)

    def test_a_missing_file_names_the_shipped_traces(self) -> None:
        with pytest.raises(TraceError, match=r"no such file.*lrm_math_open"):
            read("no_such_trace")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="no trace in this folder; name the files"):
            read(tmp_path)
