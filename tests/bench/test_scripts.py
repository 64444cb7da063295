"""The benchmark scripts: verdicts, refusals of figures without a passed comparison, and what is counted."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from benchmarks import bench_compile, bench_memory, bench_models, bench_overhead, common
from benchmarks.common import batched, write_json
from fmtprop import dnnl
from fmtprop.api import compile as compile_model
from fmtprop.bench import Agreement, Benchmark, Environment, Quartiles
from fmtprop.bench.interleave import entry_of
from fmtprop.errors import FmtpropError
from fmtprop.runtime.plan import Buffer, Home, Plan, Step

PASSED = Agreement(True, 1e-6, 1e-4)
WRONG = Agreement(False, 0.5, 1e-4, "output 0: largest relative error 0.5 exceeds the tolerance 0.0001")


def benchmark(times: dict[str, list[float]], wrong: tuple[str, ...] = ()) -> Benchmark:
    agreements = {name: WRONG if name in wrong else PASSED for name in times}
    timed = {name: figures for name, figures in times.items() if name not in wrong}
    entries = tuple(entry_of(name, agreements[name], timed, "fmtprop") for name in times)
    return Benchmark("fmtprop", 3, 1, 0, entries, Environment("A CPU", ("avx2",), 2, 2, {"torch": "2.9"}))


# ---------------------------------------------------------------- models

TIMES = {"fmtprop": [10.0, 20.0, 10.0], "torch": [20.0, 40.0, 30.0], "openvino": [8.0, 16.0, 8.0]}


def test_times_ours_is_paired() -> None:
    result = benchmark(TIMES)
    assert bench_models.times_ours(result, result["torch"]) == Quartiles(2.0, 2.0, 2.5)
    assert bench_models.times_ours(result, result["openvino"]) == Quartiles(0.8, 0.8, 0.8)


def test_verdicts() -> None:
    by_peer = {verdict.target.peer: verdict for verdict in bench_models.judge("resnet50", 1, benchmark(TIMES))}
    assert set(by_peer) == {"torch", "openvino"}  # ONNX Runtime did not take part
    assert by_peer["torch"].met is True
    assert by_peer["openvino"].met is False
    assert str(by_peer["openvino"]) == (
        "target at most 1.15 × OpenVINO: MISSED, fmtprop takes 1.250 [1.250, 1.250] × its time"
    )
    assert bench_models.judge("resnet50", 4, benchmark(TIMES)) == []
    assert bench_models.judge("chain", 1, benchmark(TIMES)) == []


@pytest.mark.parametrize(("ours", "met"), [(11.5, True), (11.6, False)])
def test_the_bound_itself_is_met(ours: float, met: bool) -> None:
    (verdict,) = bench_models.judge("resnet50", 1, benchmark({"fmtprop": [ours], "openvino": [10.0]}))
    assert verdict.met is met


def test_no_ratio_without_our_own_agreement() -> None:
    result = benchmark(TIMES, wrong=("fmtprop",))
    assert bench_models.times_ours(result, result["torch"]) is None
    verdicts = bench_models.judge("resnet50", 1, result)
    assert [verdict.met for verdict in verdicts] == [None, None]
    text = bench_models.render("resnet50", 1, result)
    assert "not measured" in text and "fmtprop: output 0: largest relative error" in text
    assert "[" not in text.replace("[quartiles]", ""), "there is a ratio"


def test_no_figures_of_a_wrong_contender() -> None:
    result = benchmark(TIMES, wrong=("torch",))
    assert bench_models.times_ours(result, result["torch"]) is None
    row = next(line for line in bench_models.render("resnet50", 1, result).splitlines() if line.startswith("torch "))
    assert row.split() == ["torch", "not", "timed", "5e-01"]


def test_misspelt_contender_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_models.main(["chain", "--vs", "opnvino"]) == 2
    assert "unknown contender 'opnvino'; known: " in capsys.readouterr().err


def test_a_busy_machine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    common.warn_if_busy(0.2)
    assert capsys.readouterr().err == ""
    common.warn_if_busy(3.14)
    assert "the machine is busy (load 3.1)" in capsys.readouterr().err


# ---------------------------------------------------------------- models of any batch size


def test_batched_has_the_same_weights() -> None:
    one, three = batched("residual", 1), batched("residual", 3)
    assert three.input_nodes[0].results[0].dims == (3, 3, 32, 32)
    assert three.constants == one.constants


@pytest.mark.parametrize(
    ("name", "batch", "message"),
    [("chain", 0, "chain: batch is 0, must be at least 1"), ("own.json", 2, "own.json: a graph has one batch size")],
)
def test_impossible_batch(name: str, batch: int, message: str) -> None:
    with pytest.raises(FmtpropError, match=f"^{message}"):
        batched(name, batch)


def test_json_has_no_infinity(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    write_json(path, [{"error": math.inf, "figures": (1.0, math.nan)}])
    assert json.loads(path.read_text()) == [{"error": None, "figures": [1.0, None]}]


# ---------------------------------------------------------------- memory


def test_live_activations_leave_out_scratchpads_and_the_callers_tensors() -> None:
    node = compile_model("chain", verify="off").plan.steps[0].node
    buffers = (
        Buffer(Home.INPUT, 1000, 0, 0),
        Buffer(Home.ARENA, 10, 0, 1),
        Buffer(Home.ARENA, 20, 1, 2),
        Buffer(Home.ARENA, 500, 1, 1),  # scratchpad
        Buffer(Home.ARENA, 15, 2, 2),
        Buffer(Home.CONSTANT, 5000, 0, 2),
        Buffer(Home.OUTPUT, 2000, 2, 3),
    )
    steps = tuple(Step(node, {}, (), scratchpad) for scratchpad in (None, 3, None))
    plan = Plan("small", steps, buffers, (), (), (), 600, 530, (), 1)
    assert bench_memory.live_activations(plan) == 35
    assert bench_memory.live_activations(Plan("none", (), (), (), (), (), 0, 0, (), 1)) == 0


@pytest.mark.parametrize(("grown", "met"), [(463_000_000, True), (463_000_001, False)])
def test_memory_limit(grown: int, met: bool) -> None:
    """103 MB of weights + 1.3 × 200 MB of activations + 100 MB."""
    usage = bench_memory.Usage(grown, 0, 0)
    one = bench_memory.Footprint("m", 1, "propagate", 103_000_000, 200_000_000, 0, 0, usage, usage, PASSED)
    assert one.limit == 463_000_000 and one.met is met


def test_peak_and_resident_memory_grow_with_what_is_touched() -> None:
    before = bench_memory.usage()
    block = torch.ones(8 << 20)  # 32 MiB
    grown = bench_memory.usage() - before
    assert grown.rss > 24 << 20 and block.numel() == 8 << 20


def test_missing_field() -> None:
    with pytest.raises(FmtpropError, match=r"^/proc has no field VmHWM; memory is measured on Linux only$"):
        bench_memory.parse_status("Name:\tpython\n", "VmHWM")


# ---------------------------------------------------------------- overhead


def test_nothing_is_called_like_the_true_function_and_succeeds() -> None:
    net = compile_model("chain")
    assert bench_overhead.nothing()(net.plan.steps[0].primitive.handle, dnnl.Stream(dnnl.Engine.cpu()).handle) == 0


def test_a_hollow_model_computes_nothing_and_leaves_the_true_one_alone() -> None:
    net = compile_model("chain")
    inputs = net.random_inputs()
    (expected,) = net.run_flat(inputs)  # kept: memory that is freed would be found again with the right numbers in it
    execute = dnnl.hot_execute
    empty = bench_overhead.hollow(net)
    assert dnnl.hot_execute is execute, "the true function is not restored"
    assert not torch.equal(empty.run_flat(inputs)[0], expected)
    assert torch.equal(net.run_flat(inputs)[0], expected)


def test_plans_with_fallbacks_are_refused() -> None:
    class Fallback(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.cumsum(x, 1))

    net = compile_model(Fallback().eval(), torch.ones(2, 8))
    with pytest.raises(FmtpropError, match=r"1 steps run in PyTorch, the first is .*choose a model without fallbacks"):
        bench_overhead.hollow(net)


def test_no_share_without_agreement() -> None:
    ms = Quartiles(1.0, 1.0, 1.0)
    good = bench_overhead.Overhead("resnet50", 50, ms, Quartiles(0.01, 0.01, 0.01), Quartiles(0.01, 0.01, 0.01), PASSED)
    bad = bench_overhead.Overhead("chain", 3, None, None, None, WRONG)
    assert good.met is True and good.microseconds_per_step == pytest.approx(0.2)
    assert bad.met is None and bad.microseconds_per_step is None
    text = bench_overhead.render([good, bad])
    assert "< 2%: met" in text and "chain: WRONG OUTPUTS, no figures: output 0" in text


# ---------------------------------------------------------------- compile


def test_import_of_nothing_fails() -> None:
    with pytest.raises(FmtpropError, match=r"^import no_such_module failed: ModuleNotFoundError"):
        bench_compile.import_seconds("no_such_module", repeats=1)


def test_a_wrong_compilation_is_named() -> None:
    one = bench_compile.Compilation("chain", "warm", {"load": 0.01, "plan": 0.02}, WRONG)
    text = bench_compile.render({"fmtprop": 0.025}, [one])
    assert "chain, warm: WRONG OUTPUTS: output 0" in text
    assert ["chain,", "warm", "10", "20", "30"] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("module", [common, bench_memory])
def test_examples(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0 and outcome.failed == 0
