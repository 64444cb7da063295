"""Logs of real programs (tests/verbose/data), and whatever else may stand in a log."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmtprop.verbose import Ledger, parse_line
from tests.cli.command import fmtprop

DATA = Path(__file__).parent / "data"
LOGS = sorted(DATA.glob("*.log"))
LINES = [line for log in LOGS for line in log.read_text().splitlines()]
EXECUTED = [line for line in LINES if ",exec,cpu," in line]
HEADERS = [
    "onednn_verbose,v1,primitive,exec,cpu",
    "onednn_verbose,v1,1795387003476.165039,primitive,exec,cpu",
    "onednn_verbose,primitive,exec,cpu",
    "onednn_verbose,exec,cpu",
    "onednn_verbose,1695.25,exec,gpu:0",
    "dnnl_verbose,exec,cpu",
    "mkldnn_verbose,exec",
]
REST = "reorder,jit:uni,undef,src_f32::blocked:abcd:f0 dst_bf16::blocked:aBcd16b:f0,,,2x16x3x3,0.25"


def line(src, dst, problem="2x16x3x3", kind="reorder", impl="jit:uni"):
    formats = f"src_f32::blocked:{src}:f0 dst_f32::blocked:{dst}:f0"
    return f"onednn_verbose,exec,cpu,{kind},{impl},undef,{formats},,,{problem},1"


def ledger_of(*lines):
    ledger = Ledger()
    ledger.read(lines)
    return ledger


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_every_execution_of_a_real_log_is_counted(log):
    lines = [text for text in log.read_text().splitlines() if ",exec,cpu," in text]
    data = ledger_of(*log.read_text().splitlines()).to_dict()
    assert data["primitives"]["count"] == len(lines) > 0
    assert data["primitives"]["seconds"] == pytest.approx(sum(float(text.rsplit(",", 1)[1]) for text in lines) / 1e3)
    reorders = [text for text in lines if ",exec,cpu,reorder," in text]
    assert data["reorders"]["count"] == len(reorders) == sum(row["count"] for row in data["by_reorder"])
    assert 0 < data["reorders"]["share"] < 1 and data["reorders"]["bytes"] > 0


@pytest.mark.parametrize("header", HEADERS)
def test_headers(header):
    execution = parse_line(f"{header},{REST}\n")
    assert (execution.kind, execution.impl, execution.seconds) == ("reorder", "jit:uni", 0.00025)
    assert [operand.tag for operand in execution.operands] == ["abcd", "aBcd16b"]
    assert execution.nbytes == 288 * 6


@pytest.mark.parametrize("before", ["step 1/10 ", "onednn_verbose,exec,cpu,conv", "\x1b[31m"])
def test_what_another_thread_printed_before(before):
    assert parse_line(f"{before}{HEADERS[0]},{REST}") == parse_line(f"{HEADERS[0]},{REST}")


@pytest.mark.parametrize(
    "text",
    ["", "hello", "onednn_verbose,", "onednn_verbose,v1,graph,exec,cpu,100,k,a,b,c,d,e,0.5",
     f"onednn_verbose,v1,primitive,create:cache_miss,cpu,{REST}", f"onednn_verbose,exec,cpu,{REST[:-4]}nan",
     f"onednn_verbose,exec,cpu,{REST[:-4]}-1", "onednn_verbose,exec,cpu,reorder,0.5", "x" * 10**6 + HEADERS[0]],
)  # fmt: skip
def test_what_is_no_execution(text):
    assert parse_line(text) is None


@given(st.sampled_from(EXECUTED), st.integers(0, 400), st.text(max_size=20), st.integers(0, 400))
def test_cut_and_mixed_lines_raise_nothing(text, cut, other, place):
    ledger = ledger_of(text[:cut], text[cut:], text[:place] + other + text[place:])
    json.dumps(ledger.to_dict(), allow_nan=False)
    assert ledger.to_text()


def test_findings():
    pack = line("abcd", "Acdb16a")
    chain = [line("abcd", "acdb"), line("acdb", "acdb", kind="pooling"), line("acdb", "abcd")]
    found = ledger_of(pack, pack, *chain, line("ab", "ab", kind="eltwise", impl="ref:any")).findings()
    assert {(row["kind"], row["count"]) for row in found} == {
        ("weights packed again", 2),
        ("reorder that is undone", 1),
        ("reference implementation", 1),
    }
    assert ledger_of(pack, line("abcd", "acdb"), line("abcd", "acdb")).findings() == []


def test_memory_is_bounded():
    ledger = ledger_of(*(line("ab", "ba", f"{size}x3") for size in range(1, 20_000)))
    assert len(ledger.by_reorder) == 10_001 and ledger.reorders.count == 19_999


def test_speed():
    text = (EXECUTED * 1000)[:20_000]
    start = perf_counter()
    ledger_of(*text)
    rate = sum(map(len, text)) / (perf_counter() - start) / 1e6
    assert rate > 2, f"{rate:.1f} MB/s"  # some 40 on a quiet machine: a guard against quadratic time


def test_command_line(capsys, tmp_path):
    code, out, err = fmtprop(capsys, "verbose", LOGS[0], "--json")
    data = json.loads(out)
    assert (code, err) == (0, "") and data["primitives"]["count"] > 0
    assert {"primitives", "reorders", "by_implementation", "by_kind", "findings"} <= data.keys()
    assert "reorders" in fmtprop(capsys, "verbose", LOGS[0]).out
    (tmp_path / "empty").write_text("nothing here\n")
    code, _, err = fmtprop(capsys, "verbose", tmp_path / "empty")
    assert code == 1 and "set ONEDNN_VERBOSE=1" in err
    code, _, err = fmtprop(capsys, "verbose", tmp_path / "gone")
    assert code == 2 and "gone cannot be read: No such file" in err


def test_a_program_is_run(capsys):
    script = f"import os, sys; print(os.environ['ONEDNN_VERBOSE']); print({HEADERS[0] + ',' + REST!r}); sys.exit(3)"
    code, out, err = fmtprop(capsys, "verbose", "--json", "--", sys.executable, "-c", script)
    assert (code, err) == (3, "1\n") and json.loads(out)["reorders"]["count"] == 1
    code, _, err = fmtprop(capsys, "verbose", "--", "/no/such/program", "x")
    assert code == 2 and "/no/such/program cannot be run: No such file" in err


@pytest.mark.parametrize("sizes", ["²1x3", "1x", "x", "9" * 5000, "-1x3", "1x3x"])
def test_sizes_that_are_none_have_no_bytes(sizes):
    operands = "src:f32::blocked:ab::f0 dst:f32::blocked:ba::f0"
    line = f"onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,{operands},,,{sizes},0.1"
    execution = parse_line(line)
    assert execution is not None and execution.nbytes == 0
