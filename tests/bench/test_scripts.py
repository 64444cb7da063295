"""The benchmark scripts: verdicts, refusals of figures without a passed comparison, and what is counted."""

from __future__ import annotations

import doctest
import json
import math
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from benchmarks import (
    bench_compile,
    bench_layers,
    bench_memory,
    bench_models,
    bench_overhead,
    bench_region,
    common,
    flops,
    layers,
    models,
)
from benchmarks.common import write_json
from benchmarks.layers import Layer
from benchmarks.models import TEN, Model
from benchmarks.peak import PEAK, PEAK_FLOPS
from benchmarks.targets import Result, Verdict, geometric_mean, judge, judge_all
from fmtprop import dnnl
from fmtprop.api import compile as compile_model
from fmtprop.bench import Agreement, Benchmark, Environment, Quartiles
from fmtprop.bench.contenders import contender
from fmtprop.bench.interleave import entry_of
from fmtprop.bench.processes import call_in_process
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


def result(times: dict[str, list[float]], model: str = "resnet50", batch: int = 1, dtype: str = "f32") -> Result:
    return Result(model, batch, dtype, PEAK_FLOPS, benchmark(times))


def test_times_ours_is_paired() -> None:
    one = result(TIMES)
    assert one.times_ours(one.benchmark["torch"]) == Quartiles(2.0, 2.0, 2.5)
    assert one.times_ours(one.benchmark["openvino"]) == Quartiles(0.8, 0.8, 0.8)


def test_verdicts() -> None:
    verdicts = {verdict.wording: verdict for verdict in judge(result(TIMES))}
    assert {wording: verdict.met for wording, verdict in verdicts.items()} == {
        "at least 1.4 × faster than torch eager": True,
        "at most 1.15 × OpenVINO": False,
        "at most 1.02 × the best peer (openvino)": False,
    }, "ONNX Runtime did not take part, nor the peak"
    assert str(verdicts["at most 1.15 × OpenVINO"]) == (
        "target at most 1.15 × OpenVINO: MISSED, 0.800 [0.800, 0.800] where 0.870 is enough"
    )
    assert [verdict.wording[:12] for verdict in judge(result(TIMES, batch=4))] == ["at most 1.02"]
    assert judge(result(TIMES, "chain")) == []
    assert any(verdict.least == 1.15 for verdict in judge(result(TIMES, "shufflenet_v2", 16)))


@pytest.mark.parametrize(("ours", "met"), [(11.5, True), (11.6, False)])
def test_the_bound_itself_is_met(ours: float, met: bool) -> None:
    verdict, _ = judge(result({"fmtprop": [ours], "openvino": [10.0]}))
    assert verdict.met is met


def test_the_best_peer_is_another_runtime_of_our_precision() -> None:
    times = {"fmtprop": [9.0], "torch": [12.0], "fmtprop-plain": [7.0], "openvino-bf16": [5.0], PEAK: [1.0]}
    for dtype, best in (("f32", "torch"), ("bf16", "openvino-bf16")):
        found = result(times, dtype=dtype).best_peer
        assert found is not None and found.name == best
    assert result({"fmtprop": [9.0], "fmtprop-plain": [7.0]}).best_peer is None


def test_share_of_the_peak() -> None:
    """As many operations as the peak's kernel has, in twice its time."""
    one = result({**TIMES, PEAK: [5.0, 10.0, 5.0]})
    assert one.share_of_peak == Quartiles(0.5, 0.5, 0.5)
    assert one.peak == PEAK_FLOPS / 5e-3
    verdict = next(verdict for verdict in judge(one) if "peak" in verdict.wording)
    assert verdict == Verdict("at least 80% of the peak", 0.8, Quartiles(0.5, 0.5, 0.5)) and verdict.met is False
    assert "3.70 GFLOP a run; fmtprop's share: 0.50 [0.50, 0.50]" in bench_models.render(one)
    assert result(TIMES).share_of_peak is None and result(TIMES).peak is None


def test_no_ratio_without_our_own_agreement() -> None:
    one = Result("resnet50", 1, "f32", 0, benchmark(TIMES, wrong=("fmtprop",)))
    assert one.times_ours(one.benchmark["torch"]) is None
    assert {verdict.met for verdict in judge(one)} == {None}
    text = bench_models.render(one)
    assert "not measured" in text and "fmtprop: output 0: largest relative error" in text
    assert "[" not in text.replace("[quartiles]", ""), "there is a ratio"
    assert geometric_mean([one]) is None


def test_no_figures_of_a_wrong_contender() -> None:
    one = Result("resnet50", 1, "f32", 0, benchmark(TIMES, wrong=("torch",)))
    assert one.times_ours(one.benchmark["torch"]) is None
    row = next(line for line in bench_models.render(one).splitlines() if line.startswith("torch "))
    assert row.split() == ["torch", "not", "timed", "5e-01"]


def test_the_geometric_mean_is_over_the_best_peers() -> None:
    two = [result({"fmtprop": [1.0], "torch": [2.0], "openvino": [4.0]}), result({"fmtprop": [1.0], "torch": [8.0]})]
    assert geometric_mean(two) == pytest.approx(Quartiles(4.0, 4.0, 4.0))
    with pytest.raises(KeyError):
        geometric_mean(two, "openvino")  # the second one was never raced
    assert judge_all(two) is None, "two models are not ten"
    ten = [result({"fmtprop": [1.0], "openvino": [1.06]}, name) for name in TEN]
    verdict = judge_all(ten)
    assert verdict is not None and verdict.met and verdict.least == 1.05
    assert judge_all([result({"fmtprop": [1.0], "openvino": [1.06]}, name, batch=2) for name in TEN]) is None
    text = bench_models.render_all(ten)
    assert [line.split() for line in text.splitlines() if line.startswith("geometric")] == [
        ["geometric", "mean", "1.06", "1.06"]
    ]
    assert text.endswith("met, 1.060 [1.060, 1.060] where 1.050 is enough")


def test_bf16_is_skipped_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dnnl, "supports", lambda dtype: dtype != "bf16")
    assert bench_models.main(["chain", "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.startswith("skipped: oneDNN has no bf16 on this CPU (")


def test_misspelt_contender_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_models.main(["chain", "--vs", "opnvino"]) == 2
    assert "unknown contender 'opnvino'; known: " in capsys.readouterr().err


def test_a_busy_machine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    common.warn_if_busy(0.2)
    assert capsys.readouterr().err == ""
    common.warn_if_busy(3.14)
    assert "the machine is busy (load 3.1)" in capsys.readouterr().err


# ---------------------------------------------------------------- models of any batch size


@pytest.mark.usefixtures("own_cache")
def test_batches_have_the_same_weights_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, three = Model("residual").graph(), Model("residual", 3).graph()
    assert three.input_nodes[0].results[0].dims == (3, 3, 32, 32)
    assert three.constants == one.constants
    (kept,) = tmp_path.glob("benchmarks/residual-3-*/graph.json")
    monkeypatch.setattr(models, "from_torch", None)
    assert Model("residual", 3).graph().constants == one.constants
    assert kept.parent == Model("residual", 3).onnx.parents[1]


def test_inputs_and_module_are_the_architectures() -> None:
    model = Model("bert_base", 2)
    (tokens,) = model.inputs()
    assert tokens.shape == (2, 128) and tokens.dtype == torch.int64 and not torch.equal(tokens[0], tokens[1])
    make = Model("residual").module()
    (x,) = Model("residual").inputs()
    assert make is not None and torch.equal(make()(x), make()(x))
    own = Model("own.json")
    assert own.module() is None and own.onnx is None


@pytest.mark.parametrize(
    ("name", "batch", "message"),
    [("chain", 0, "chain: batch is 0, must be at least 1"), ("own.json", 2, "own.json: a graph has one batch size")],
)
def test_impossible_batch(name: str, batch: int, message: str) -> None:
    with pytest.raises(FmtpropError, match=f"^{message}"):
        Model(name, batch)


def test_json_has_no_infinity(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    write_json(path, [{"error": math.inf, "figures": (1.0, math.nan)}])
    assert json.loads(path.read_text()) == [{"error": None, "figures": [1.0, None]}]


# ---------------------------------------------------------------- memory


def test_live_activations_leave_out_scratchpads_and_the_callers_tensors() -> None:
    step = compile_model("chain", verify="off").plan.steps[0]
    buffers = (
        Buffer(Home.INPUT, 1000, 0, 0),
        Buffer(Home.ARENA, 10, 0, 1),
        Buffer(Home.ARENA, 20, 1, 2),
        Buffer(Home.ARENA, 500, 1, 1),  # scratchpad
        Buffer(Home.ARENA, 15, 2, 2),
        Buffer(Home.CONSTANT, 5000, 0, 2),
        Buffer(Home.OUTPUT, 2000, 2, 3),
    )
    steps = tuple(Step(step.node, {}, (), step.executable, scratchpad) for scratchpad in (None, 3, None))
    plan = Plan("small", steps, buffers, (), (), (), 600, 530, (), 1)
    assert bench_memory.live_activations(plan) == 35
    assert bench_memory.live_activations(Plan("none", (), (), (), (), (), 0, 0, (), 1)) == 0


def footprint(rss: int, peak: int, name: str = "fmtprop", passed: Agreement = PASSED) -> bench_memory.Footprint:
    """103 MB of weights + 1.3 × 200 MB of activations + 100 MB may be taken."""
    needs = bench_memory.Needs(103_000_000, 200_000_000, 0, 0) if name.startswith("fmtprop") else None
    return bench_memory.Footprint(
        "m", name, bench_memory.Usage(0, 0, 0), bench_memory.Usage(rss, 0, peak), passed, needs
    )


@pytest.mark.parametrize(("grown", "met"), [(463_000_000, True), (463_000_001, False)])
def test_memory_limit(grown: int, met: bool) -> None:
    assert footprint(grown, grown).met is met
    assert footprint(grown, grown, "openvino").met is None


def test_peaks_are_compared_with_openvinos_of_the_same_precision() -> None:
    four = [
        *(footprint(1, 30), footprint(1, 40, "openvino")),
        *(footprint(1, 30, "fmtprop-plain-bf16"), footprint(1, 20, "openvino-bf16")),
    ]
    assert bench_memory.ratios(four) == {"m, fmtprop": 0.75, "m, fmtprop-plain-bf16": 1.5}
    text = bench_memory.render(four)
    assert "target m, fmtprop: peak at most OpenVINO's: met, 0.75 × its" in text
    assert "target m, fmtprop-plain-bf16: peak at most OpenVINO's: MISSED, 1.50 × its" in text
    assert bench_memory.ratios([footprint(1, 30), footprint(1, 40, "openvino", WRONG)]) == {}


def test_memory_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    bench_memory.write_files(Model("residual"), tmp_path, ir=False)
    entry = contender("fmtprop-plain")
    found = call_in_process("m", partial(bench_memory.measure, "m", entry, tmp_path, 1, 2))
    assert found.agreement.passed and found.contender == "fmtprop-plain"
    # small ones stand in the document
    assert 19_000 < found.needs.weights / 4 <= 19_488 and 0 < found.grown.rss <= found.grown.peak < 200 << 20
    with pytest.raises(FmtpropError, match=r"^torch: memory is measured for fmtprop and openvino, openvino-bf16$"):
        bench_memory.measure("m", contender("torch"), tmp_path, 1, 1)


def test_peak_and_resident_memory_grow_with_what_is_touched() -> None:
    before = bench_memory.usage()
    block = torch.ones(8 << 20)  # 32 MiB
    grown = bench_memory.usage() - before
    assert grown.rss > 24 << 20 and block.numel() == 8 << 20


def test_missing_field() -> None:
    with pytest.raises(FmtpropError, match=r"^/proc has no field VmHWM; memory is measured on Linux only$"):
        bench_memory.parse_status("Name:\tpython\n", "VmHWM")


# ---------------------------------------------------------------- layers


def test_turns_of_a_profile_become_their_median() -> None:
    turns = [[Layer("copy", (2,), "jit", ms), Layer("product", (3,), "gemm", 2 * ms)] for ms in (5.0, 1.0, 2.0)]
    assert bench_layers.middle(turns) == [Layer("copy", (2,), "jit", 2.0), Layer("product", (3,), "gemm", 4.0)]


def test_layers_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    command = ["chain", "--vs", "fmtprop-plain", "--rounds", "1", "--runs", "1", "--threads", "1", "--json", str(path)]
    assert bench_layers.main(command) == 0
    out = capsys.readouterr().out
    assert "chain by kind" in out and "largest losses by size" in out and "\nall " in out
    (record,) = json.loads(path.read_text())
    assert {layer["kind"] for layer in record["layers"]["fmtprop"]} >= {"convolution", "pooling"}
    assert record["layers"]["fmtprop-plain"][0]["dims"] == [32, 32, 32]
    assert bench_layers.main(["chain", "--vs", "torch"]) == 1
    assert "torch: layers are known of fmtprop and openvino, openvino-bf16, onnxruntime only" in capsys.readouterr().err


# ---------------------------------------------------------------- overhead


def test_nothing_is_called_like_the_true_function_and_succeeds() -> None:
    net = compile_model("chain")
    (primitive, *_) = (step.node.choice.handle.pd for step in net.plan.steps)
    assert bench_overhead.nothing()(primitive.handle, dnnl.Stream(dnnl.Engine.cpu()).handle) == 0


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


def test_a_call_of_a_region_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_region.main(["1", "--rounds", "2", "--repeats", "10"]) == 0
    printed = capsys.readouterr().out
    assert "added" in printed and "15:" in printed and "WRONG" not in printed
    few = Quartiles(10.0, 12.0, 14.0)
    wrong = bench_region.Overhead(4, 28, 6, None, None, None, WRONG)
    assert bench_region.Overhead(1, 7, 3, few, few, few, PASSED).met is True and wrong.met is None
    assert "4 layers: WRONG OUTPUTS, no figures: output 0" in bench_region.render([wrong])


# ---------------------------------------------------------------- compile


def test_import_of_nothing_fails() -> None:
    with pytest.raises(FmtpropError, match=r"^import no_such_module failed: ModuleNotFoundError"):
        bench_compile.import_seconds("no_such_module", repeats=1)


def test_a_wrong_compilation_is_named() -> None:
    one = bench_compile.Compilation("chain", "warm", {"load": 0.01, "plan": 0.02}, WRONG)
    cold = bench_compile.Compilation("chain", "cold", {"load": 0.01, "confirm": 0.5, "plan": 0.02}, PASSED)
    assert ["chain,", "cold", "10", "500", "20", "530"] in [
        line.split() for line in bench_compile.render({}, [cold, one]).splitlines()
    ]
    text = bench_compile.render({"fmtprop": 0.025}, [one])
    assert "chain, warm: WRONG OUTPUTS: output 0" in text
    assert ["chain,", "warm", "10", "20", "30"] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("script", [bench_compile, bench_overhead, bench_memory])
def test_a_script_from_its_command_line(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_compile, "import_seconds", lambda *_: 0.5)
    more = {
        bench_compile: [],
        bench_overhead: ["--rounds", "2"],
        bench_memory: ["--of", "fmtprop", "--runs", "1"],
    }
    assert script.main(["chain", "--threads", "1", *more[script]]) in (0, 1)  # 1: a target is missed
    printed = capsys.readouterr().out
    assert "chain" in printed and "onednn" in printed and "WRONG" not in printed


@pytest.mark.parametrize("module", [common, flops, layers, models, bench_memory])
def test_examples(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0 and outcome.failed == 0
