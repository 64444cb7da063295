"""A compiled model as its user meets it: any strides, results to keep, clear errors, threads, forks, no leaks."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import resource
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.api import Options
from fmtprop.runtime.agreement import relative_error
from fmtprop.store import Store
from tests.threads import torch_threads


class Small(nn.Module):
    """Two convolutions and a residual: enough to have blocked formats, post-ops and an arena."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x))
        x = torch.relu(x + self.b(x))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """Run this file with two threads, whatever the suite runs with: pools, forks and scratchpads are about them."""
    with torch_threads(2):
        yield


@pytest.fixture(scope="module")
def small(two_threads: None) -> tuple[nn.Module, fp.CompiledModel, torch.Tensor]:
    torch.manual_seed(1)
    module = Small().eval()
    x = torch.randn(2, 3, 12, 12)
    return module, fp.compile(module, x), x


def expected(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(*inputs)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("policy", ["plain", "naive", "propagate"])
def test_every_policy_gives_pytorchs_answer(small, policy):
    module, _, x = small
    assert relative_error(fp.compile(module, x, policy=policy)(x), expected(module, x)) < 1e-5


def test_results_are_the_callers_to_keep(small):
    module, net, x = small
    first = net(x)
    copy = first.clone()
    second = net(-x)
    assert torch.equal(first, copy)
    assert relative_error(second, expected(module, -x)) < 1e-5


def test_inputs_are_never_written(small):
    _, net, x = small
    before = x.clone()
    net(x)
    assert torch.equal(x, before)


def test_an_in_place_graph_does_not_write_its_input():
    net = fp.compile(nn.ReLU(), torch.ones(4, 4))
    x = torch.full((4, 4), -1.0)
    assert torch.equal(net(x), torch.zeros(4, 4))
    assert torch.equal(x, torch.full((4, 4), -1.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], 1)[:, :3],
        lambda x: x.expand(2, 3, 12, 12),
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: x.clone().requires_grad_(),
    ],
    ids=["channels_last", "transposed", "sliced", "expanded", "interleaved", "requires_grad"],
)
def test_any_strides_just_work(small, change):
    module, net, x = small
    y = change(x[:1].expand(2, 3, 12, 12) if change is not None else x)
    assert relative_error(net(y), expected(module, y)) < 1e-5


def test_a_channels_last_boundary_takes_channels_last_without_a_reorder():
    torch.manual_seed(0)
    module, x = nn.Conv2d(16, 16, 1).eval(), torch.randn(1, 16, 8, 8)
    last = fp.MemoryDesc((1, 16, 8, 8), "f32", tag="nhwc")
    net = fp.compile(module, x, boundary={"input": last, "output_1": last})
    y = net(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(y, expected(module, x)) < 1e-5


class Structured(nn.Module):
    def forward(self, x, *, scale):
        return {"sum": x + scale, "same": x, "pair": (x * scale, None)}


def test_the_models_own_structure_comes_back():
    x, scale = torch.randn(2, 3), torch.randn(2, 3)
    graph = fp.from_torch(Structured(), x, kwargs={"scale": scale})
    result = fp.compile(graph)(x, scale=scale)
    assert set(result) == {"sum", "same", "pair"}
    assert torch.allclose(result["sum"], x + scale)
    assert torch.equal(result["same"], x)
    assert result["same"].data_ptr() != x.data_ptr()
    assert result["pair"][1] is None


def test_one_tensor_returned_twice_is_two_tensors():
    class Twice(nn.Module):
        def forward(self, x):
            y = torch.relu(x)
            return y, y

    a, b = fp.compile(Twice(), torch.ones(3))(torch.ones(3))
    a += 1
    assert torch.equal(b, torch.ones(3))


def test_a_constant_output_is_a_copy():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return torch.relu(x), self.w

    module = Constant()
    net = fp.compile(module, torch.ones(3))
    net(torch.ones(3))[1].add_(1)
    assert torch.equal(module.w, torch.ones(3))
    assert torch.equal(net(torch.ones(3))[1], torch.ones(3))


def test_integer_and_unsupported_types_run_on_the_reference_target():
    class Sorted(nn.Module):
        def forward(self, ids):
            return torch.sort(ids, dim=-1).values

    ids = torch.tensor([[2, 9, 1]])
    net = fp.compile(Sorted(), ids)
    assert torch.equal(net(ids), torch.tensor([[1, 2, 9]]))
    assert [step.node.op for step in net.plan.steps if step.target == "reference"] == ["aten"]
    double = nn.Linear(4, 4).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(fp.compile(double, x)(x), expected(double, x))


def test_an_empty_batch_gives_an_empty_result():
    module = nn.Linear(8, 4)
    assert fp.compile(module, torch.ones(0, 8))(torch.ones(0, 8)).shape == (0, 4)


def test_the_result_of_a_model_that_changed_after_compiling_does_not_change():
    module = nn.Linear(4, 4).eval()
    x = torch.randn(1, 4)
    net = fp.compile(module, x)
    before = net(x)
    with torch.no_grad():
        module.bias.add_(100.0)
    assert relative_error(net(x), before) == 0.0


# ---------------------------------------------------------------- errors


def test_wrong_shape_says_what_it_was_compiled_for(small):
    with pytest.raises(
        fp.InputError, match=r"input x has shape \(1, 3, 12, 12\), but the model was compiled for \(2, 3, 12, 12\)"
    ):
        small[1](torch.randn(1, 3, 12, 12))


def test_wrong_dtype(small):
    with pytest.raises(
        fp.InputError, match=r"input x is torch.float64, but .* compiled for f32; pass x.to\(torch.float32\)"
    ):
        small[1](torch.randn(2, 3, 12, 12).double())


def test_complex_input(small):
    with pytest.raises(fp.FmtpropError, match="complex"):
        small[1](torch.randn(2, 3, 12, 12) + 1j)


def test_wrong_device(small):
    with pytest.raises(fp.InputError, match=r"input x is on meta, but plans run on the CPU"):
        small[1](torch.randn(2, 3, 12, 12, device="meta"))


def test_wrong_layout(small):
    with pytest.raises(fp.InputError, match=r"input x has layout torch.sparse_coo"):
        small[1](torch.randn(2, 3, 12, 12).to_sparse())


def test_not_a_tensor(small):
    with pytest.raises(fp.InputError, match=r"input x must be a torch.Tensor, got list"):
        small[1]([1.0])
    with pytest.raises(fp.InputError, match=r"input x must be a torch.Tensor, got ndarray; pass torch.from_numpy\(x\)"):
        small[1](small[2].numpy())


@pytest.mark.parametrize("inputs", [5, None, torch.ones(1, 3), iter(())])
def test_flat_inputs_that_are_no_list(small, inputs):
    kind = type(inputs).__name__
    with pytest.raises(fp.InputError, match=rf"Small takes a list or tuple of tensors, one for each input, got {kind}"):
        small[1].run_flat(inputs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "is a nested tensor; pass a dense one of shape"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged), "is a nested tensor"),
        (lambda x: x.to(torch.complex64), "is torch.complex64, but the model was compiled for f32"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r"is torch.qint8, .* for f32; pass x.dequantize"),
    ],
    ids=["nested", "jagged", "complex", "quantized"],
)
def test_a_kind_of_tensor_that_no_plan_takes(small, change, message):
    _, net, x = small
    with pytest.raises(fp.InputError, match=f"input x {message}"):
        net(change(x))


def test_wrong_number_of_inputs(small):
    with pytest.raises(fp.InputError, match=r"takes 1 input \(x\), got 2"):
        small[1](small[2], small[2])


@pytest.mark.parametrize(
    ("option", "value"),
    [("dtype", "int4"), ("policy", "best"), ("target", "gpu"), ("tune", "guess"), ("verify", "maybe")],
)
def test_a_wrong_option_names_parameter_and_values(option, value):
    with pytest.raises(
        fp.UnsupportedOpError, match=rf"The '{option}' parameter of compile must be one of .* Got '{value}'"
    ):
        fp.compile(nn.ReLU(), torch.ones(1), **{option: value})


@pytest.mark.parametrize("option", ["confirm", "winograd", "release_weights"])
def test_a_switch_is_true_or_false(option):
    with pytest.raises(fp.UnsupportedOpError, match=f"The '{option}' parameter of compile must be True or False. Got"):
        fp.compile(nn.ReLU(), torch.ones(1), **{option: "x"})


@pytest.mark.parametrize("budget", [-1.0, 0, float("nan"), True, "2"])
def test_a_tuning_budget_is_a_time(budget):
    with pytest.raises(fp.UnsupportedOpError, match=f"tune_budget must be a number of seconds above 0, got {budget!r}"):
        fp.compile(nn.ReLU(), torch.ones(1), tune_budget=budget)


def test_several_example_inputs_are_a_tuple():
    with pytest.raises(fp.UnsupportedOpError, match=r"several example inputs are one tuple: .*\(model, \(x, y\)\)"):
        fp.compile(nn.Bilinear(1, 1, 1), torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("shapes", [0, "rows"])
def test_dynamic_shapes_are_a_dict_or_a_tuple(shapes):
    with pytest.raises(fp.UnsupportedOpError, match=f"dynamic_shapes must be a dict .* got {shapes!r}"):
        fp.compile(nn.ReLU(), torch.ones(1), dynamic_shapes=shapes)


class Returns(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, x):
        return self.result(x)


@pytest.mark.parametrize("result", [lambda x: None, lambda x: (), lambda x: x.shape[0]], ids=["none", "empty", "size"])
def test_a_module_that_returns_no_tensor(result):
    with pytest.raises(fp.ImportModelError, match=r"Returns returns no tensor .*; return its results"):
        fp.compile(Returns(result), torch.ones(2, 3))


def test_a_thing_that_is_no_model():
    with pytest.raises(fp.ImportModelError, match=r"cannot compile a int: pass a torch.nn.Module"):
        fp.compile(3)


@pytest.mark.parametrize("name", ["eval", "state_dict", "to", "fc"])
def test_an_attribute_of_the_module_is_looked_for_there(name):
    net = fp.compile(nn.Linear(3, 4), torch.ones(2, 3), policy="plain", verify="off")
    rows = torch.export.Dim("rows", max=8)
    dynamic = fp.compile(nn.Linear(3, 4), torch.ones(2, 3), dynamic_shapes=({0: rows},), policy="plain", verify="off")
    for model in (net, dynamic):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"'{name}': it is a plan .* change the model that was compiled"):
            getattr(model, name)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_formatted_graph_says_why_it_cannot_be_copied(small, duplicate):
    module, net, x = small
    with pytest.raises(fp.HandleError, match=r"neither copied nor pickled. .* the imported one, and compile it again"):
        duplicate(net.graph)
    assert relative_error(copy.deepcopy(net)(x), expected(module, x)) < 1e-5
    imported = fp.from_torch(module, x)
    duplicate(imported)


# ---------------------------------------------------------------- threads, forks, leaks


def test_two_threads_run_one_model_at_once(small):
    module, net, x = small
    inputs = [x * k for k in range(1, 5)]
    wanted = [expected(module, y) for y in inputs]
    wrong: list[float] = []

    def work(k: int) -> None:
        for _ in range(50):
            error = relative_error(net(inputs[k]), wanted[k])
            if error > 1e-5:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _in_child(net, x, queue) -> None:
    queue.put(net(x).tolist())


def test_a_forked_child_runs_and_does_not_hang(small):
    _, net, x = small
    wanted = net(x)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(net, x, queue))
    child.start()
    try:
        got = torch.tensor(queue.get(timeout=60))
    finally:
        child.kill()
        child.join()
    assert relative_error(got, wanted) < 1e-5
    assert relative_error(net(x), wanted) == 0.0


def test_a_thousand_runs_leak_nothing(small):
    _, net, x = small
    for _ in range(50):
        net(x)
    gc.collect()
    handles = dict(dnnl.live_handles())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1000):
        net(x)
    gc.collect()
    assert dict(dnnl.live_handles()) == handles
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB


def test_compiling_and_dropping_leaks_no_handles():
    def once() -> None:
        net = fp.compile(Small().eval(), torch.ones(1, 3, 8, 8))
        net(torch.ones(1, 3, 8, 8))

    once()
    gc.collect()
    kinds = ("primitive", "memory", "stream")
    before = {kind: dnnl.live_handles().get(kind, 0) for kind in kinds}
    for _ in range(3):
        once()
    gc.collect()
    assert {kind: dnnl.live_handles().get(kind, 0) for kind in kinds} == before


# ---------------------------------------------------------------- the plan's own check


def test_a_wrong_primitive_is_planned_around(monkeypatch):
    from fmtprop.runtime import selfcheck

    honest = selfcheck.check_node
    blamed: list[str] = []

    def accuse(node, *how):
        if node.op == "convolution" and (not blamed or node.choice.impl in blamed):
            blamed.append(node.choice.impl)
            return 1.0
        return honest(node, *how)

    monkeypatch.setattr(selfcheck, "check_node", accuse)
    monkeypatch.setattr(Store, "has_passed", lambda self, key: False)
    module, x = nn.Conv2d(8, 24, 3).eval(), torch.randn(1, 8, 9, 9)
    with pytest.warns(
        RuntimeWarning, match=r"is off by 1.0e\+00 relative; reproduce with: benchdnn .*; planning around it"
    ):
        net = fp.compile(module, x)
    used = [step.node.choice.impl for step in net.plan.steps if step.node.op == "convolution"]
    assert not set(used) & set(blamed)
    assert relative_error(net(x), expected(module, x)) < 1e-5


@pytest.mark.usefixtures("own_cache")
def test_checks_are_remembered_across_compiles(monkeypatch):
    from fmtprop.runtime import selfcheck

    module, x = nn.Conv2d(8, 8, 3).eval(), torch.randn(1, 8, 9, 9)
    counted: list[str] = []
    honest = selfcheck.check_node
    monkeypatch.setattr(selfcheck, "check_node", lambda *a: counted.append(a[0].name) or honest(*a))
    fp.compile(module, x)
    first = len(counted)
    fp.compile(module, x)
    assert first > 0
    assert len(counted) == first


def test_a_damaged_or_unwritable_memory_costs_a_warning_only(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(blocked))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = fp.compile(nn.Conv2d(8, 8, 3).eval(), torch.ones(1, 8, 9, 9))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1 and "cannot read the cache" in messages[0]
    assert {warning.category for warning in caught} == {RuntimeWarning}
    assert net(torch.ones(1, 8, 9, 9)).shape == (1, 8, 7, 7)


def test_verify_full_checks_the_whole_model(small, monkeypatch):
    module, _, x = small
    from fmtprop.compiling import from_graph

    monkeypatch.setattr(from_graph, "error_of_output", lambda got, want, precision: 1.0)
    with pytest.raises(fp.PlanError, match=r"output output_1 is off by 1.0e\+00 relative to PyTorch"):
        fp.compile(module, x, verify="full")


def test_options_have_the_documented_defaults():
    assert Options() == Options("f32", "optimal", "onednn", "auto", "on", {}, {}, None, True)


def test_a_compiled_graph_is_no_model() -> None:
    net = fp.compile(torch.nn.Linear(4, 4), torch.ones(1, 4))
    with pytest.raises(fp.GraphError, match=r"has its formats already, and its weights are packed .*fmtprop\.load"):
        fp.compile(net.graph)
