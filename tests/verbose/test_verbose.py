"""Logs of real programs (tests/verbose/data), and whatever else may stand in a log."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import signal
import sys
from pathlib import Path
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmtprop.verbose import Ledger, parse_line
from tests.cli.command import fmtprop, start

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
    pack, read = line("abcd", "Acdb16a", "64x32"), read_of("Acdb16a")
    chain = [line("abcd", "acdb"), line("acdb", "acdb", kind="pooling"), line("acdb", "abcd")]
    found = ledger_of(pack, read, pack, read, *chain, line("ab", "ab", kind="eltwise", impl="ref:any")).findings()
    assert {(row["kind"], row["count"]) for row in found} == {
        ("weights packed again", 2),
        ("reorder that is undone", 1),
        ("activations in row-major", 1),
        ("reference implementation", 1),
    }
    (undone,) = [row for row in found if row["kind"] == "reorder that is undone"]
    assert undone["name"].endswith(" around pooling")


def test_memory_is_bounded():
    ledger = ledger_of(*(line("ab", "ba", f"{size}x3") for size in range(1, 20_000)))
    assert len(ledger.to_dict()["by_reorder"]) == 19_999 == ledger.reorders.count
    ledger.read(line("ab", "ba", f"{size}x4") for size in range(1, 20_000))
    data = ledger.to_dict()
    assert len(data["by_reorder"]) == 20_001 and data["reorders"]["count"] == 2 * 19_999
    assert sum(row["count"] for row in data["by_reorder"]) == 2 * 19_999
    assert ledger.reorders.seconds == pytest.approx(2 * 19_999e-3)


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
    code, out, err = fmtprop(capsys, "verbose", tmp_path / "empty")
    assert code == 1 and out == "" and "set ONEDNN_VERBOSE=1" in err and "ONNX Runtime and numpy" in err
    (tmp_path / "idle").write_text("onednn_verbose,v1,info,oneDNN v3.13.0 (commit 1289c3b6)\n")
    code, out, err = fmtprop(capsys, "verbose", tmp_path / "idle")
    assert code == 1 and out == "" and "oneDNN executed nothing" in err and "set ONEDNN_VERBOSE" not in err
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


def test_the_library_and_what_was_created_are_told():
    data = ledger_of(*(DATA / "debian_v2.6.log").read_text().splitlines()).to_dict()
    assert data["library"] == {"version": "2.6.3", "runtime": "OpenMP,nthr:1", "isa": "Intel AVX2"}
    assert (data["created"]["cache_miss"]["count"], data["created"]["cache_hit"]["count"]) == (6, 3)
    assert {row["kind"] for row in data["findings"]} == {
        "reference implementation", "activations leave their blocks", "weights packed again",
    }  # fmt: skip
    advice = next(row["advice"] for row in data["findings"] if row["kind"].startswith("activations"))
    assert "in PyTorch: channels_last, mkldnn tensors" in advice


def test_a_log_of_everything_counts_executions_alone():
    text = (DATA / "torch_eager_all_v3.12.log").read_text()
    assert ",exec:check," in text and ",create:dispatch," in text
    assert ledger_of(*text.splitlines()).primitives.count == 8


def test_v0():
    reorder, conv = (
        "mkldnn_verbose,exec,reorder,jit:uni,undef,in:f32_nchw out:f32_nChw8c,num:1,50x3x224x224,4.5",
        "mkldnn_verbose,exec,convolution,jit:avx2,forward_inference,fsrc:nchw fwei:gOhwi8o fbia:undef fdst:nChw8c,"
        "alg:convolution_direct,mb50_g1ic3oc64_ih224oh112kh7sh2dh0ph3_iw224ow112kw7sw2dw0pw3,24.1",
    )
    assert parse_line(reorder).nbytes == 2 * 4 * 50 * 3 * 224 * 224 and parse_line(reorder).operands[1].tag == "nChw8c"
    assert parse_line(conv).seconds == 0.0241 and ledger_of(reorder, conv).reorders.count == 1


@pytest.mark.parametrize("behind", ["step 2/10", " step", "\r", "\x1b[0m", "onednn_verbose,v1,prim"])
def test_what_another_thread_printed_behind(behind):
    ledger = ledger_of(f"{HEADERS[0]},{REST}{behind}")
    assert ledger.primitives.count == 1 and ledger.primitives.seconds == 0.00025


def test_two_threads_in_one_line():
    assert ledger_of(f"{HEADERS[0]},{REST}{HEADERS[3]},{REST}").reorders.count == 2


@pytest.mark.parametrize("cut", ["", ",0.", ",0.2"])
def test_a_line_that_was_cut_before_its_time_is_none(cut):
    text = (
        "onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:f32::blocked:a::f0 dst:f32::blocked:a::f0,,,32"
    )
    assert ledger_of(text + cut).primitives.count == (1 if cut else 0)


@pytest.mark.parametrize(
    ("kind", "problem", "sizes"),
    [
        ("convolution", "mb1_ic3oc32_ih32oh32kh3sh1dh0ph1_iw32ow32kw5sw1dw0pw1", "32x3x3x5"),
        ("convolution", "mb1_g32ic32oc64_ih9oh7kh3sh1dh0ph0_iw9ow7kw3sw1dw0pw0", "32x2x1x3x3"),
        ("convolution", "g1mb2_ic4oc8_id5od3kd3sd1dd0pd0_ih5oh3kh2sh1dh0ph0_iw5ow3kw1sw1dw0pw0", "8x4x3x2x1"),
        ("matmul", "8x64:64x32:8x32", "64x32"),
        ("pooling", "mb1ic32_ih18oh9", ""),
    ],
)
def test_sizes_of_weights(kind, problem, sizes):
    assert parse_line(line("a", "b", problem, kind)).weights_sizes == sizes


def read_of(tag, rows=8, columns=32):
    return (
        "onednn_verbose,v1,primitive,exec,cpu,matmul,brg:avx2,undef,src:f32::blocked:ab::f0 "
        f"wei:f32:a:blocked:{tag}::f0 dst:f32::blocked:ab::f0,,,{rows}x64:64x{columns}:{rows}x{columns},1"
    )


def kinds(*lines):
    return [row["kind"] for row in ledger_of(*lines).findings()]


def test_equal_layers_that_pack_once_are_none_that_pack_again():
    pack, read = line("ab", "BA16a16b4a", "64x32"), read_of("BA16a16b4a")
    head = [line("ab", "BA16a16b4a", "64x10"), read_of("BA16a16b4a", columns=10)]
    assert kinds(pack, pack, *[read] * 6, *[head[1]] * 3) == [], "two layers, three runs"
    assert kinds(*[pack, read] * 3, *head) == [], "three layers, one run, each packed before it is read"
    assert kinds(*([pack, read] * 3 + head) * 2) == ["weights packed again"] * 2, "two runs"
    assert kinds(*[pack, read] * 3) == ["weights packed again"], "one layer, three runs"
    first = [pack, read_of("BA16a16b4a", rows=1), head[0], read_of("BA16a16b4a", 1, 10)]
    assert kinds(*first, *([pack, read, *head]) * 3) == ["weights packed again"] * 2, "a first run of another batch"
    assert kinds(pack, pack) == [], "nothing tells how many layers there are"
    assert kinds(pack, pack, *[read] * 3) == [], "packed before the first run, in which one of two layers has no line"


@pytest.mark.parametrize("runtime", ["OpenMP,nthr:1", "TBB,nthr:2", "threadpool,nthr:1"])
def test_advice_is_that_of_the_runtime(runtime):
    ledger = ledger_of(f"onednn_verbose,v1,info,cpu,runtime:{runtime}", line("abcd", "acdb"))
    (row,) = ledger.findings()
    assert row["advice"].startswith("keep activations channels-last")
    assert ("PyTorch" in row["advice"]) == runtime.startswith("OpenMP")


def test_two_programs_in_one_log_have_advice_of_their_own():
    pytorch = ["onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:1", line("aBcd8b", "abcd")]
    openvino = ["onednn_verbose,v1,info,cpu,runtime:threadpool,nthr:1", line("abcd", "acdb")]
    for lines in ([*pytorch, *openvino], [*openvino, *pytorch]):
        advice = {row["kind"]: row["advice"] for row in ledger_of(*lines).findings()}
        assert "PyTorch" in advice["activations leave their blocks"], lines
        assert "PyTorch" not in advice["activations in row-major"], lines


def test_a_finding_has_one_line_and_its_costliest_cases():
    text = ledger_of(*[line("abcd", "acdb", f"1x{size}x8x8") for size in range(3, 20)]).to_text()
    text += ledger_of(*[line("abcd", "abcd", f"1x{size}x8x8") for size in range(3, 20)]).to_text()
    assert text.count("keep activations channels-last") == 1
    assert text.count("create it dense, once") == 1 and "12 more" in text


def test_rows_copies_and_slow_reorders():
    found = ledger_of(
        line("abcd", "acdb"), line("acdb", "aBcd8b"), line("abcd", "abcd"), line("abc", "cab", impl="ref:any"),
    ).findings()  # fmt: skip
    assert [(row["kind"], row["count"]) for row in found] == [
        ("activations in row-major", 1),
        ("activations leave their blocks", 1),
        ("reorders in a row", 1),
        ("reorder that changes nothing", 1),
        ("reference reorder", 1),
    ]


def test_numbers_of_four_bits():
    text = "onednn_verbose,exec,cpu,reorder,jit:uni,undef,src_s4::blocked:ab::f0 dst_f32::blocked:ab::f0,,,3x5,1"
    assert parse_line(text).nbytes == 8 + 60


PACKED = {
    "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress,
    "two bytes a character": lambda text: text.decode().encode("utf-16"),
    "two bytes a character, unmarked": lambda text: text.decode().encode("utf-16-le"),
    "the other byte first": lambda text: text.decode().encode("utf-16-be"),
    "two bytes a character, packed": lambda text: gzip.compress(text.decode().encode("utf-16")),
    "Windows": lambda text: text.replace(b"\n", b"\r\n"),
    "a container": lambda text: b"".join(
        json.dumps({"log": line + "\n", "time": "2026-11-23T10:00:00.1Z"}).encode() + b"\n"
        for line in text.decode().splitlines()
    ),
    "a cluster": lambda text: b"".join(b"2026-11-23T10:00:00.1Z stdout F " + line for line in text.splitlines(True)),
    "garbage": lambda text: bytes(range(256)) * 1000 + b"\n" + text + b"\0" * 300_000,
}  # fmt: skip


@pytest.mark.parametrize("how", PACKED)
def test_a_log_in_other_wrappings(capsys, tmp_path, how):
    log = DATA / "openvino_v3.13.log"
    (tmp_path / "log").write_bytes(PACKED[how](log.read_bytes()))
    assert fmtprop(capsys, "verbose", tmp_path / "log") == fmtprop(capsys, "verbose", log)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"x" * 999, mtime=0)[:20], "is compressed and damaged"),
        (b"\x28\xb5\x2f\xfd", "zstdcat FILE"),
        (b"PK\x03\x04", "unzip -p FILE"),
    ],
    ids=["gzip", "zstd", "zip"],
)
def test_a_log_that_cannot_be_unpacked(capsys, tmp_path, content, message):
    (tmp_path / "log").write_bytes(content)
    code, out, err = fmtprop(capsys, "verbose", tmp_path / "log")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_several_logs_are_no_program(capsys):
    code, out, err = fmtprop(capsys, "verbose", *LOGS[:2])
    assert (code, out) == (2, "") and "cannot be run: Permission denied; of several logs: cat LOG..." in err


def test_two_libraries_in_one_process():
    logs = [DATA / "torch_eager_v3.12.log", DATA / "openvino_v3.13.log"]
    library = ledger_of(*(line for log in logs for line in log.read_text().splitlines())).to_dict()["library"]
    assert library["version"] == "3.12.0; 3.13.0"


@pytest.mark.parametrize(
    ("create", "name"),
    [
        ("primitive,create:nested_cache_hit", "nested_cache_hit"), ("primitive,create:cache_blob", "cache_blob"),
        ("primitive,create_nested:cache_miss", "nested_cache_miss"), ("primitive,create", "create"),
        ("graph,create", "graph"),
    ],
)  # fmt: skip
def test_kinds_of_creation(create, name):
    created = ledger_of(f"onednn_verbose,v1,{create},cpu,{REST}").to_dict()["created"]
    assert created == {name: {"count": 1, "seconds": 0.00025}}
    assert ledger_of(f"onednn_verbose,v1,{create},cpu,{REST[:-4]}1e999").to_dict()["created"] == {}


@pytest.mark.parametrize("behind", [",extra:1", ",,", "Epoch 3, loss 0.5 (best)", ",key:a,key:b"])
def test_fields_behind_the_time(behind):
    """Of a newer version, or words of another thread with commas in them."""
    ledger = ledger_of(f"{HEADERS[0]},{REST}{behind}")
    assert (ledger.primitives.count, ledger.primitives.seconds, ledger.reorders.nbytes) == (1, 0.00025, 288 * 6)


def test_a_program_of_one_word_and_one_that_a_signal_ends(capsys, tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho one\nprintf 'two... %s' '{HEADERS[0]},{REST}'\nkill -SEGV $$\n")
    program.chmod(0o755)
    code, out, err = fmtprop(capsys, "verbose", "--json", "--", program)
    assert (code, err) == (139, "one\ntwo... ") and json.loads(out)["reorders"]["count"] == 1


def test_a_reference_implementation_has_the_reasons_of_refusals():
    head = "onednn_verbose,v1,primitive,"
    body = "forward_inference,src:f32::blocked:ab::f0 dst:f32::blocked:ab::f0,,axis:0"
    lines = [
        f"{head}create:dispatch,softmax,unsupported format tag,src/cpu/x64/a.cpp:1",
        f"{head}create:dispatch,softmax,cpu,softmax,jit:avx2,{body},2x3,bad axis, not dense,src/cpu/x64/a.cpp:2",
        f"{head}create:dispatch,softmax,cpu,softmax,jit:avx2,{body},9x9,another one's,src/cpu/x64/a.cpp:2",
        f"{head}create:dispatch,convolution,another kind's,src/cpu/x64/a.cpp:2",
        f"{head}exec,cpu,softmax,ref:any,{body},2x3,1.5",
    ]
    ledger = Ledger()
    ledger.read(lines)
    (row,) = ledger.findings()
    assert row["kind"] == "reference implementation"
    assert row["reasons"] == ["unsupported format tag", "bad axis, not dense"]
    assert "(refused before: unsupported format tag; bad axis, not dense)" in ledger.to_text()


def test_the_packing_of_weights_is_counted_apart():
    log = Path(__file__).parent / "data" / "openvino_v3.13.log"
    ledger = ledger_of(*log.read_text().splitlines())
    packings = ledger.to_dict()["reorders"]["packings"]
    assert packings["count"] == 2 < ledger.reorders.count and 0 < packings["seconds"] < ledger.reorders.seconds
    assert "2 of these pack weights, " in ledger.to_text()
    assert "pack weights" not in ledger_of(HEADERS[0] + "," + REST).to_text()


def test_weights_of_training_are_no_activations():
    """Two steps of PyTorch 2.13: weights are packed for both directions, and their gradient is unpacked."""
    said = "onednn_verbose,v1,primitive,exec,cpu,"
    reorders = [("abcd", "Acdb16a"), ("abcd", "Bcda16b"), ("Acdb16a", "abcd")]
    lines = [f"{said}reorder,jit:uni,undef,src:f32::blocked:{a}::f0 dst:f32::blocked:{b}::f0,,,16x3x3x3,0.5"
             for a, b in reorders]  # fmt: skip
    sizes = "mb2_ic3oc16_ih40oh38kh3sh1dh0ph0_iw40ow38kw3sw1dw0pw0"
    formats = "src:f32::blocked:abcd::f0 wei:f32::blocked:Acdb16a::f0 bia:undef::undef::: dst:f32::blocked:aBcd16b::f0"
    conv = f"{said}convolution,jit:avx512_core,backward_weights,{formats},,alg:convolution_direct,{sizes},1"
    ledger = Ledger()
    ledger.read([*lines[:2], conv, lines[2]] * 2)
    assert ledger.reorders.count == 6 and ledger.findings() == []
    inference = Ledger()
    inference.read([lines[0], conv.replace("backward_weights", "forward_inference")] * 2)
    assert [row["kind"] for row in inference.findings()] == ["weights packed again"]


def with_comma(text):
    head, _, time = text.rpartition(",")
    return f"{head},{time.replace('.', ',')}" if text in EXECUTED else text


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_program_that_writes_a_comma_into_numbers(log):
    """``setlocale`` of C: printf of 0.25 writes 0,25."""
    lines = log.read_text().splitlines()
    assert ledger_of(*map(with_comma, lines)).to_dict() == ledger_of(*lines).to_dict()


def test_a_time_of_more_than_30_years_is_none():
    lines = [f"{HEADERS[0]},{REST[:-4]}{time}" for time in ("1e308", "1e308", "1e12")]
    assert ledger_of(*lines, *lines).primitives.count == 0


@pytest.mark.parametrize("value", ["0", "none", "2"])
def test_a_log_that_the_environment_switches_off_is_on(capsys, monkeypatch, value):
    monkeypatch.setenv("ONEDNN_VERBOSE", value)
    program = "import os; print(*(os.environ[name] for name in ('ONEDNN_VERBOSE', 'DNNL_VERBOSE')))"
    assert fmtprop(capsys, "verbose", "--", sys.executable, "-c", program)[2].startswith(
        "2 1\n" if value == "2" else "1 1\n"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_program_and_its_log_is_added_up(number, code):
    text = f"{HEADERS[0]},{REST}"
    program = f"echo '{text}'; sleep 60 & trap 'kill $!; exit {code}' INT TERM; echo ready >&2; wait"
    with start("verbose", "--json", "--", "sh", "-c", program, start_new_session=True) as process:
        assert process.stderr.readline() == "ready\n"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == code and json.loads(out)["reorders"]["count"] == 1


def test_a_line_in_colour():
    ledger = Ledger()
    ledger.read_line(
        "\x1b[32monednn_verbose,v1,primitive,create:cache_miss,cpu,reorder,jit:uni,undef,,,,2x3,0.25\x1b[0m"
    )
    assert ledger.to_dict()["created"] == {"cache_miss": {"count": 1, "seconds": 0.00025}}


def test_a_log_of_creations_alone_names_the_switch(capsys, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(f"onednn_verbose,v1,info,oneDNN v3.2.0\nonednn_verbose,v1,primitive,create:cache_miss,cpu,{REST}\n")
    done = fmtprop(capsys, "verbose", path)
    assert done.code == 1 and "no execution: set ONEDNN_VERBOSE=1" in done.err
