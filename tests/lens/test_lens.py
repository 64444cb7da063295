"""PyTorch's hidden reorders: all of oneDNN's log is attributed, and the model stays as it was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fmtprop as fp
from fmtprop.cli.lens import _program
from fmtprop.errors import FmtpropError, InputError
from fmtprop.lens.findings import lens_from, lens_of
from fmtprop.lens.gain import Measurement, gain_of
from fmtprop.lens.tracer import Tracer
from fmtprop.verbose import Ledger
from tests import processes
from tests.cli.command import ROOT, fmtprop


class Net(torch.nn.Module):
    """Two convolutions in modules, and one of a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU())
        self.last = torch.nn.Conv2d(16, 32, 3)
        self.weight = torch.nn.Parameter(torch.randn(8, 32, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(self.last(self.stem(x)), self.weight)


INPUT = torch.ones(1, 3, 64, 64)

SCRIPT = """
import sys, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Conv2d(16, 32, 3)
    def forward(self, x):
        return torch.nn.functional.conv2d(self.last(x), torch.ones(8, 32, 3, 3))
with torch.no_grad():
    Net().eval()(torch.ones(2, 16, 64, 64))
print("its own output", *sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return processes.run(*words, PYTHONPATH=str(ROOT), **environment)


def test_reorders_belong_to_modules_and_lines():
    net = Net().eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    lens = fp.explain_torch(net, INPUT, variants=[])
    places = {(row.module, row.kind): row for row in lens.rows if row.primitives}
    assert {("last", "Conv2d"), ("", "Net")} <= places.keys()
    assert lens.attributed_share == 1.0 and lens.reorders >= 3
    file, _, line = places["last", "Conv2d"].line.rpartition(":")
    assert file == __file__ and "self.last(" in Path(file).read_text().splitlines()[int(line) - 1]
    assert 0 < lens.reorder_seconds < lens.primitive_seconds
    assert 0 < lens.activation_seconds < lens.reorder_seconds
    assert all(row.weights_seconds + row.activation_seconds <= row.reorder_seconds + 1e-12 for row in lens.rows)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_program_is_attributed_as_its_log_says(script, tmp_path):
    trace, program = tmp_path / "trace.json", (sys.executable, script, "3", "words")
    done = run("-m", "fmtprop", "lens", "--ways", "none", "--json", "--trace", trace, "--", *program)
    assert done.returncode == 3 and "its own output 3 words" in done.stderr
    data = json.loads(done.stdout)
    ledger = Ledger()
    ledger.read(run(script, "0", ONEDNN_VERBOSE="1").stdout.splitlines())
    assert data["reorders"]["count"] == ledger.reorders.count > 0
    assert data["primitives"]["count"] == ledger.primitives.count
    assert data["attributed_share"] >= 0.99 and data["model"] == "script.py"
    assert {row["module"] for row in data["operators"]} >= {"", "last"}
    text = lens_from(data).to_text()
    assert "hidden reorders take" in text and "(Conv2d)" in text
    events = json.loads(trace.read_text())["traceEvents"]
    operators, reorders = spans(events, "operator"), spans(events, "reorder")
    assert reorders and all(any(within(one, operator) for operator in operators) for one in reorders)


def test_other_ways_are_measured():
    lens = fp.explain_torch(Net().eval(), [INPUT], variants=["channels_last", "mkldnn", "fmtprop"], repeats=2)
    eager, last, mkldnn, ours = lens.variants
    assert [one.name for one in lens.variants] == ["eager", "channels_last", "mkldnn", "fmtprop"]
    assert eager.gain is None and last.gain.low_seconds <= last.gain.seconds <= last.gain.high_seconds
    for one in (eager, last, ours):
        assert not one.failure and one.seconds > 0 and one.error < 1e-4
    for one in (last, ours):
        assert one.gain.seconds == pytest.approx(eager.seconds - one.seconds), "what the two times say"
    assert last.reorders < eager.reorders and ours.reorders <= last.reorders
    assert mkldnn.failure or mkldnn.seconds > 0, "its functional convolution may not take an mkldnn tensor"
    assert json.loads(lens.to_json())["variants"][0]["name"] == "eager"
    assert "in other ways, measured in turns" in lens.to_text()


CROWD = """
import os, signal, sys, threading, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Conv2d(16, 32, 3)
    def forward(self, x):
        return self.last(x)
net = Net().eval()
def run():
    with torch.no_grad():
        net(torch.ones(2, 16, 64, 64))
    print("of a thread")
threads = [threading.Thread(target=run) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
child = os.fork()
run()
if child == 0:
    sys.exit(7)
print("the child ends with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_program_with_threads_and_a_child_that_a_signal_ends(tmp_path):
    (tmp_path / "crowd.py").write_text(CROWD)
    done = run("-m", "fmtprop", "lens", "--ways", "none", "--json", "--", tmp_path / "crowd.py")
    data = json.loads(done.stdout)
    assert done.returncode == 143
    (row,) = data["operators"]
    assert row["module"] == "last" and row["calls"] == 4, "of three threads, and of the program itself"
    each = row["primitives"] // 4
    assert f"{each} more executions (" in done.stderr and "child processes" in done.stderr
    assert done.stderr.count("of a thread") == 5 and "the child ends with 7" in done.stderr
    assert "onednn_verbose" not in done.stderr, "the log is no output of the program"


def test_a_program_that_ends_without_findings(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos.close(1)\nos._exit(4)")
    done = run("-m", "fmtprop", "lens", "--", tmp_path / "ends.py")
    assert (done.returncode, done.stdout) == (4, "") and "a signal or os._exit ended the program" in done.stderr


def test_a_program_that_has_closed_its_output(capfd):
    keep = os.dup(1)
    os.close(1)
    try:
        lens = fp.explain_torch(Net().eval(), INPUT, variants=[])
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(1)
    finally:
        os.dup2(keep, 1)
        os.close(keep)
    assert lens.reorders > 0


TRAINING = """
import torch
from torch.utils.checkpoint import checkpoint
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 16, 3)
        self.last = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.Sigmoid())
        self.head = torch.nn.Linear(32, 4)
    def forward(self, x):
        return self.head(checkpoint(self.last, self.first(x).relu(), use_reentrant=False).mean((2, 3)))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(torch.ones(2, 3, 32, 32)), torch.tensor([0, 1])).backward()
    optimizer.step()
"""


def test_operators_of_the_backward_pass_belong_to_their_modules(tmp_path):
    (tmp_path / "training.py").write_text(TRAINING)
    done = run("-m", "fmtprop", "lens", "--ways", "none", "--json", "--", tmp_path / "training.py")
    data = json.loads(done.stdout)
    assert data["variants"] == [] and data["attributed_share"] == 1.0 and data["reorders"]["count"] > 0
    backward = {
        row["module"]: row for row in data["operators"] if row["operator"] == "aten.convolution_backward.default"
    }
    forward = {row["module"]: row for row in data["operators"] if row["operator"] == "aten.convolution.default"}
    assert backward.keys() == {"first", "last.0"} == forward.keys()
    assert backward["first"]["line"] == forward["first"]["line"] and backward["first"]["calls"] == 2
    again = [row for row in data["operators"] if row["operator"] == "aten.convolution.default"]
    assert sorted((row["module"], row["calls"]) for row in again) == [("first", 2), ("last.0", 2), ("last.0", 2)], (
        "the checkpoint runs it again"
    )


def test_the_costliest_module_of_a_program_runs_in_other_ways(script):
    done = run("-m", "fmtprop", "lens", "--ways", "channels_last,fmtprop", "--json", "--", script, "0")
    assert done.returncode == 0 and "measuring Net in other ways" in done.stderr, done.stderr
    data = json.loads(done.stdout)
    eager, last, ours = data["variants"]
    assert data["subject"] == "Net"
    assert ours["reorders"] < eager["reorders"] == data["reorders"]["count"] and last["gain"] and not ours["failure"]
    text = lens_from(data).to_text()
    assert "Net in other ways, measured in turns" in text
    assert f"with channels_last, a call of Net has {last['reorders']} of {eager['reorders']} reorders" in text
    last["failure"] = "no such format"
    assert "which channels_last may remove, take" in lens_from(data).to_text()
    last["failure"] = ""
    assert json.loads(lens_from(data).to_json()) == data


def test_a_module_runs_again_with_the_keywords_of_its_last_call(script):
    text = (
        script.read_text()
        .replace("def forward(self, x):", "def forward(self, x, times=1, *, y):")
        .replace("return torch", "for _ in range(times - 1): y = y + self.last(x).mean()\n        return y * torch")
    )
    script.write_text(
        text.replace("(torch.ones(2, 16, 64, 64))", "(torch.ones(2, 16, 64, 64), times=4, y=torch.ones(1))")
    )
    done = run("-m", "fmtprop", "lens", "--ways", "channels_last", "--json", "--", script, "0")
    data = json.loads(done.stdout)
    eager, other = data["variants"]
    assert eager["reorders"] == data["reorders"]["count"], "four convolutions and more, as in the program"
    assert not other["failure"] and other["error"] < 1e-4, done.stderr


def test_a_way_that_does_not_exist(capsys, monkeypatch, script):
    monkeypatch.setitem(sys.modules, "fmtprop.report.files", None)  # which loads torch: only a trace needs it
    done = fmtprop(capsys, "lens", "--ways", "gpu", "--", script, "0")
    assert done.code == 2 and "unknown way 'gpu' to run a module; known: channels_last, mkldnn" in done.err


def spans(events, category):
    return [event for event in events if event.get("cat") == category]


def within(inner, outer):
    end = outer["ts"] + outer["dur"]
    return inner["tid"] == outer["tid"] and outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= end + 1e-3


def test_reorders_are_within_the_spans_of_torch_profiler(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        lens = fp.explain_torch(Net().eval(), INPUT, variants=[], repeats=2)
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    before = json.loads((tmp_path / "torch.json").read_text())["traceEvents"]
    text = lens.to_trace(tmp_path / "both.json", profile=tmp_path / "torch.json")
    events = json.loads(text)["traceEvents"]
    reorders, ours = spans(events, "reorder"), spans(events, "reorder") + spans(events, "oneDNN")
    assert len(reorders) == lens.reorders > 0
    assert len(events) == len(before) + len(ours)
    convolutions = [event for event in spans(events, "cpu_op") if event["name"] == "aten::mkldnn_convolution"]
    for one in reorders:
        assert any(within(one, convolution) for convolution in convolutions), one
    seen = sum(event["dur"] for event in ours)
    assert seen == pytest.approx(sum(row.primitive_seconds for row in lens.rows) * 1e6, rel=1e-3), "nothing is cut off"
    assert {event["args"]["module"] for event in reorders} == {row.module for row in lens.rows if row.reorders}
    lens.to_trace(tmp_path / "both.json")  # a trace is replaced by a trace
    with pytest.raises(FmtpropError, match="cannot be written"):
        lens.to_trace(tmp_path / "torch.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3}'])
def test_a_profile_that_is_none(text, tmp_path):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InputError, match=r"p\.json is no trace of torch\.profiler"):
        lens_of("x", []).to_trace(profile=tmp_path / "p.json")


def test_a_plan_has_the_clock_of_torch_profiler(tmp_path):
    """Target mkldnn runs PyTorch's operators: both saw the same calls."""
    net = fp.compile("chain", target="mkldnn", tune="model")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        report = net.report(repeats=1)
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    both = report.to_trace(profile=tmp_path / "torch.json")
    for text in (report.to_trace(), both):
        steps = [event for event in json.loads(text)["traceEvents"] if event.get("cat", "").startswith("conv")]
        operators = spans(json.loads(both)["traceEvents"], "cpu_op")
        calls = [event for event in operators if "conv" in event["name"]]
        assert steps and calls
        base = json.loads(text)["baseTimeNanoseconds"]
        other = json.loads((tmp_path / "torch.json").read_text())["baseTimeNanoseconds"]
        shift = (base - other) / 1e3
        for step in steps:
            near = min(calls, key=lambda call: abs(call["ts"] - step["ts"] - shift))
            assert abs(near["ts"] - step["ts"] - shift) < 1e3 and near["dur"] <= step["dur"] + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("resnet", "resnet50"), ("densenet", "densenet121"), ("mobilenetv2", "mobilenetv2_w1"), ("resnet", "resnet18"),
        ("squeezenet", "squeezenet_v1_1"), ("efficientnet", "efficientnet_b0"), ("shufflenetv2", "shufflenetv2_w1"),
    ],
)  # fmt: skip
def test_real_networks_are_attributed(family, name):
    models = pytest.importorskip(f"pytorchcv.models.{family}")
    torch.manual_seed(0)
    net = getattr(models, name)().eval()
    lens = fp.explain_torch(net, torch.randn(1, 3, 224, 224), variants=["channels_last"], repeats=15)
    assert lens.attributed_share >= 0.99 and lens.reorders > 10
    eager, last = lens.variants
    assert last.reorders < eager.reorders


def test_a_gain_has_an_interval():
    """The stalls of a machine are not in the gain."""
    gain = gain_of([[1.0 + 0.01 * (i % 3), 2.0] for i in range(18)] + [[9.0, -9.0]] * 2)
    assert gain.low_seconds < 3.01 < gain.high_seconds and gain.seconds == pytest.approx(3.01, abs=0.005)
    assert gain.is_narrow(run_seconds=100.0)
    unsure = gain_of([[1.0], [-1.0], [2.0], [-2.0], [0.0]])
    assert unsure.low_seconds < 0 < unsure.high_seconds and not unsure.is_narrow(run_seconds=10.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.relu, INPUT), "takes a torch.nn.Module, got builtin_function_or_method"),
        ((Net(), INPUT), "evaluation mode: call module.eval"),
        ((Net().eval(), ["x"]), "input 0 of explain_torch must be a tensor on the CPU, got str"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(InputError, match=message):
        fp.explain_torch(*arguments)


def test_options_are_checked():
    with pytest.raises(InputError, match="unknown variant 'gpu' of explain_torch; known: channels_last, mkldnn"):
        fp.explain_torch(Net().eval(), INPUT, variants=["gpu"])
    with pytest.raises(InputError, match="repeats must be a whole number"):
        fp.explain_torch(Net().eval(), INPUT, repeats=0)


def test_the_tracer_gives_standard_output_back_after_an_error(capfd):
    class Wrong(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(2, 2)

    tracer = Tracer()
    with pytest.raises(RuntimeError), tracer.watching():
        Wrong()(torch.ones(3, 3))
    print("still here", flush=True)
    assert capfd.readouterr().out == "still here\n"
    assert lens_of("x", tracer.calls).to_dict()["reorders"] == {"count": 0, "seconds": 0, "share": 0.0}


def test_a_program_that_does_not_exist():
    with pytest.raises(FmtpropError, match=r"nowhere\.py cannot be run: there is no such file"):
        _program(["python", "nowhere.py"])


def test_python_is_the_interpreter_that_runs_fmtprop(tmp_path):
    (tmp_path / "script.py").write_text("")
    assert _program(["python", str(tmp_path / "script.py")])[0] == [sys.executable]
    assert _program(["/opt/python3", str(tmp_path / "script.py")])[0] == ["/opt/python3"]


@pytest.mark.parametrize("words", [["python"], ["python", "-c", "1"], ["-m"]])
def test_what_is_no_program(words):
    with pytest.raises(FmtpropError, match="lens runs a Python script or module"):
        _program(words)


def test_what_failed_has_its_reason_in_one_line():
    ways = [Measurement("eager", 1.0), Measurement("fmtprop", failure="no such thing\x1b " + 20 * "very ")]
    text = lens_of("nothing", [], ways).to_text()
    assert "\nfmtprop failed: no such thing\\x1b very very very" in text
    assert "0 hidden reorders" in text and "belongs to modules" not in text and "0 places" not in text


def test_equal_layers_are_one_row_of_the_text():
    model = torch.nn.Sequential(*[torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)]).eval()
    lens = fp.explain_torch(model, torch.ones(1, 16, 96, 96), variants=[])
    assert len(lens.rows) == 4, "the JSON form has each layer"
    assert "the costliest 1 of 1 places" in lens.to_text() and re.search(r"[0-3] and 3", lens.to_text())


def test_ctrl_c_ends_a_program_with_its_findings_and_without_a_traceback(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(
        "import time, torch\n"
        "class Net(torch.nn.Conv2d): pass\n"
        "with torch.no_grad(): Net(16, 32, 3).eval()(torch.ones(2, 16, 64, 64))\n"
        "print('waiting', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "fmtprop", "lens", "--ways", "none", "--", "python", str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stderr is not None
    while "waiting" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "the program ended with status 130" in err
    assert "Net" in out
