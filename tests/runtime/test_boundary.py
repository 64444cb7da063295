"""The caller's tensors: inputs read where they are, results written where the caller wants them, and every refusal."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import UnsupportedOpError
from fmtprop.layout import MemoryDesc
from fmtprop.runtime.agreement import relative_error
from fmtprop.runtime.boundary import Boundary, Endpoint
from fmtprop.runtime.plan import Home

LAST = torch.channels_last


class Two(nn.Module):
    """Two results: one that a primitive writes, one that is a view of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(self.conv(x)), z.reshape(-1)


@pytest.fixture(scope="module")
def two() -> tuple[nn.Module, fp.CompiledModel, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module, x, z = Two().eval(), torch.randn(2, 3, 5, 5), torch.arange(6.0).reshape(2, 3)
    return module, fp.compile(module, (x, z)), x, z


def fresh() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 4, 5, 5), torch.nan), torch.full((6,), torch.nan)


def right(two, results) -> bool:
    module, _, x, z = two
    with torch.no_grad():
        return all(relative_error(got, want) < 1e-5 for got, want in zip(results, module(x, z), strict=True))


# ---------------------------------------------------------------- out


def test_results_are_written_to_the_callers_tensors(two):
    _, net, x, z = two
    out = fresh()
    results = net(x, z, out=out)
    assert results[0] is out[0]
    assert results[1] is out[1]
    assert right(two, out)


def test_run_flat_takes_out_too(two):
    _, net, x, z = two
    out = fresh()
    results = net.run_flat([x, z], out=out)
    assert [a is b for a, b in zip(results, out, strict=True)] == [True, True]
    assert right(two, out)


def test_a_single_result_takes_a_tensor_or_a_tuple_of_one():
    net, x, y = fp.compile(nn.ReLU(), torch.ones(3)), torch.tensor([-1.0, 0.0, 2.0]), torch.empty(3)
    assert net(x, out=y) is y
    assert net(-x, out=(y,)) is y
    assert torch.equal(y, torch.tensor([1.0, 0.0, 0.0]))


class Named(nn.Module):
    def forward(self, x, out):
        return x + 2 * out


def test_an_argument_called_out_is_never_taken_for_a_destination():
    x, own = torch.randn(3), torch.randn(3)
    net, kept = fp.compile(Named(), (x, own)), own.clone()
    for args in [(x,), (x, own)]:
        with pytest.raises(fp.InputError, match=r"out= is ambiguous.*by position.*run_flat\(inputs, out="):
            net(*args, out=own)
    assert torch.equal(own, kept)
    assert torch.allclose(net(x, own), x + 2 * own)
    y = torch.empty(3)
    assert net.run_flat([x, own], out=y)[0] is y
    assert torch.allclose(y, x + 2 * own)


class Structured(nn.Module):
    def forward(self, x, *, scale):
        return {"sum": x + scale, "pair": (x * scale, None)}


def test_in_a_structure_the_callers_tensors_come_back():
    x, scale = torch.randn(2, 3), torch.randn(2, 3)
    net = fp.compile(fp.from_torch(Structured(), x, kwargs={"scale": scale}))
    out = (torch.empty(2, 3), torch.empty(2, 3))
    result = net(x, scale=scale, out=out)
    assert result["sum"] is out[0]
    assert result["pair"][0] is out[1]
    assert torch.allclose(out[0], x + scale)
    assert torch.allclose(out[1], x * scale)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, 4, 5, 5).to(memory_format=LAST),
        lambda: torch.empty(2, 8, 5, 5)[:, 2:6],
        lambda: torch.empty(2, 4, 5, 7)[..., 1:6],
        lambda: torch.empty(2, 4, 5, 10)[..., ::2],
        lambda: nn.Parameter(torch.empty(2, 4, 5, 5), requires_grad=False),
    ],
    ids=["channels_last", "channels", "columns", "every other", "parameter"],
)
def test_any_strides_take_results(two, make):
    _, net, x, z = two
    out = make(), torch.empty(12)[::2]
    net(x, z, out=out)
    assert right(two, out)


def written_directly(net: fp.CompiledModel, out: torch.Tensor, monkeypatch) -> bool:
    """Whether a run makes no tensor of its own for the (only) result."""
    made = []
    monkeypatch.setattr("fmtprop.runtime.context.Output.new", lambda self: made.append(1) or torch.empty_like(out))
    net(torch.ones(1, 16, 8, 8), out=out)
    return not made


def test_fitting_tensors_are_written_without_a_copy(monkeypatch):
    net = fp.compile(nn.Conv2d(16, 16, 1), torch.ones(1, 16, 8, 8))
    assert net.plan.buffers[net.plan.outputs[0][1].buffer].home is Home.OUTPUT
    assert written_directly(net, torch.empty(1, 16, 8, 8), monkeypatch)
    assert not written_directly(net, torch.empty(1, 16, 8, 8).to(memory_format=LAST), monkeypatch)


def test_a_channels_last_boundary_writes_to_channels_last(monkeypatch):
    last = fp.MemoryDesc((1, 16, 8, 8), "f32", tag="nhwc")
    net = fp.compile(nn.Conv2d(16, 16, 1), torch.ones(1, 16, 8, 8), boundary={"output_1": last})
    assert written_directly(net, torch.empty(1, 16, 8, 8).to(memory_format=LAST), monkeypatch)


def test_out_at_changing_addresses(two):
    _, net, x, z = two
    kept = [fresh() for _ in range(5)]
    for k, out in enumerate(kept):
        net(x * k, z + k, out=out)
    for k, out in enumerate(kept):
        assert torch.equal(out[0], net(x * k, z)[0])
        assert torch.equal(out[1], (z + k).reshape(-1))


def test_halves_of_one_tensor_are_two_tensors(two):
    """They span the same memory, interleaved, and share no element."""
    module, _, x, _ = two
    net = fp.compile(module.conv, x)
    whole = torch.empty(2, 8, 5, 5)
    net(x, out=whole[:, :4])
    net(-x, out=whole[:, 4:])
    assert torch.equal(whole, torch.cat([net(x), net(-x)], 1))
    pair = fp.compile(Pair(), torch.ones(4, 3))
    both = torch.empty(4, 6)
    pair(torch.ones(4, 3), out=(both[:, :3], both[:, 3:]))
    assert torch.equal(both, torch.tensor([1.0, 1, 1, -1, -1, -1]).expand(4, 6))


class Pair(nn.Module):
    def forward(self, x):
        return torch.relu(x), -x


def test_autograd_learns_that_a_saved_tensor_was_written():
    net, y, w = fp.compile(nn.ReLU(), torch.ones(3)), torch.ones(3), torch.ones(3, requires_grad=True)
    product = w * y
    net(torch.ones(3), out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_inference_tensors_may_be_inputs_and_outputs(two):
    _, net, x, z = two
    with torch.inference_mode():
        inputs, out = (x.clone(), z.clone()), fresh()
        net(*inputs, out=out)
    assert right(two, net(*inputs))
    assert right(two, net(*inputs, out=out))
    made_inside = fp.compile(nn.ReLU(), torch.ones(3))
    with torch.inference_mode():
        made_inside(torch.ones(3))
    assert not made_inside(torch.ones(3)).is_inference()


def test_no_tensor_of_the_caller_is_kept(two):
    _, net, x, z = two
    import weakref

    out = fresh()
    net(x, z, out=out)
    seen = weakref.ref(out[0])
    del out
    assert seen() is None


# ---------------------------------------------------------------- refusals of out


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (lambda a, b: a, r"model Two returns 2 tensors \(output_1, output_2\), out has 1"),
        (lambda a, b: (a, b, b), r"returns 2 tensors \(output_1, output_2\), out has 3"),
        (lambda a, b: {"y": a}, r"out must be a tensor or a tuple of tensors, got dict"),
        (lambda a, b: (a, None), r"out output_2 must be a torch.Tensor, got NoneType"),
        (
            lambda a, b: (a[:1], b),
            r"out output_1 has shape \(1, 4, 5, 5\), but the model was compiled for \(2, 4, 5, 5\); pass "
            r"torch.empty\(\(2, 4, 5, 5\), dtype=torch.float32\)",
        ),
        (
            lambda a, b: (a.double(), b),
            r"out output_1 is torch.float64, but the model was compiled for f32; pass torch.empty\(",
        ),
        (
            lambda a, b: (a.to("meta"), b),
            r"out output_1 is on meta, but plans run on the CPU: pass a tensor on",
        ),
        (lambda a, b: (a.to_sparse(), b), r"out output_1 has layout torch.sparse_coo; pass a strided tensor"),
        (
            lambda a, b: (a.requires_grad_(), b),
            r"out output_1 requires grad, which a compiled model cannot give; pass out.detach\(\)",
        ),
        (
            lambda a, b: (a[:1].expand(2, 4, 5, 5), b),
            r"out output_1 has strides \(0, 25, 5, 1\) for shape \(2, 4, 5, 5\): elements share memory; "
            "pass torch.empty",
        ),
        (
            lambda a, b: (a, a.view(-1)[10:16]),
            r"out output_1 shares memory with out output_2; pass tensors that do",
        ),
    ],
    ids=["too few", "too many", "dict", "None", "shape", "dtype", "device", "layout", "grad", "expanded", "overlap"],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(two, out, message):
    _, net, x, z = two
    a, b = torch.zeros(2, 4, 5, 5), torch.zeros(6)
    with pytest.raises(fp.InputError, match=message):
        net(x, z, out=out(a, b))
    assert not a.any()
    assert not b.any()


def test_an_output_must_not_lie_in_an_input():
    net, x = fp.compile(nn.ReLU(), torch.ones(4)), torch.arange(8.0)
    with pytest.raises(fp.InputError, match=r"out output_1 shares memory with input input; pass tensors that do not"):
        net(x[:4], out=x[2:6])
    assert torch.equal(net(x[:4], out=x[4:]), torch.arange(4.0))


def test_overlap_is_found_between_strided_tensors():
    net, whole = fp.compile(nn.ReLU(), torch.ones(4, 4)), torch.ones(4, 8)
    with pytest.raises(fp.InputError, match="shares memory with input"):
        net(whole[:, :4], out=whole[:, 3:7])
    assert torch.equal(net(whole[:, :4], out=whole[:, 4:]), torch.ones(4, 4))


def test_what_is_too_hard_to_tell_apart_counts_as_overlapping(monkeypatch):
    from fmtprop.runtime import boundary

    monkeypatch.setattr(boundary, "OVERLAP_STEPS", 0)
    net = fp.compile(nn.ReLU(), torch.ones(10, 10, 10))
    x = torch.ones(3000)[::3].view(10, 10, 10)
    with pytest.raises(fp.InputError, match="shares memory with input"):
        net(x, out=x.as_strided((10, 10, 10), (300, 30, 3), x.storage_offset() + 1))
    assert torch.equal(net(x, out=torch.empty(10, 10, 10)), x)


def test_an_empty_out_overlaps_nothing():
    net = fp.compile(nn.ReLU(), torch.ones(0, 4))
    x = torch.ones(0, 4)
    assert net(x, out=torch.empty(0, 4)).shape == (0, 4)


# ---------------------------------------------------------------- inputs


def test_a_fitting_input_is_read_where_it_is(two):
    _, net, x, z = two
    boundary = Boundary.of(net.plan)
    read = boundary.read([x, z])
    assert read[0] is x
    assert read[1] is z
    other = boundary.read([x.to(memory_format=LAST), z.clone().requires_grad_()])
    assert other[0].stride() == x.stride()
    assert not other[1].requires_grad


@pytest.mark.parametrize("is_inference", [False, True])
def test_inputs_of_any_mode_are_read_where_they_are(two, is_inference):
    _, net, x, z = two
    boundary = Boundary.of(net.plan)
    with torch.inference_mode():
        made_there = [x.clone(), z.clone()]
    with torch.inference_mode(is_inference):
        for given in ([x, z], made_there, [x, made_there[1]]):
            assert all(a is b for a, b in zip(boundary.read(given), given, strict=True))
            assert right(two, net(*given))


def test_a_cache_and_tokens_of_inference_mode_are_checked_at_once_from_the_second_call_on(two, monkeypatch):
    _, net, x, z = two
    boundary = Boundary.of(net.plan)
    with torch.inference_mode():
        given = [x, z.clone()]
        boundary.read(given)
        monkeypatch.setattr(Endpoint, "read", lambda *_: pytest.fail("a tensor was checked by itself"))
        assert boundary.read(given) is given


def test_one_tensor_may_be_two_inputs():
    class Product(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * y

    x = torch.randn(3)
    net = fp.compile(Product(), (x, x.clone()))
    assert torch.equal(net(x, x), x * x)


def test_a_negated_view_is_read_by_value():
    z = torch.view_as_complex(torch.randn(4, 2)).conj().imag
    assert z.is_neg()
    net = fp.compile(nn.Tanh(), torch.ones(4))
    assert torch.allclose(net(z), torch.tanh(z))
    y = torch.view_as_complex(torch.zeros(4, 2)).conj().imag
    net(torch.ones(4), out=y)
    assert torch.allclose(y, torch.tanh(torch.ones(4)))


def test_a_subclass_of_tensor_is_an_input_like_any_other(two):
    _, net, x, z = two
    assert right(two, net(nn.Parameter(x), z))


def test_contexts_keep_no_input(two):
    _, net, *given = two
    inputs = [x.clone() for x in given]
    context, _ = net._executor.lease()
    kept = [weakref.ref(x) for x in inputs]
    results = context.run(inputs)
    kept += [weakref.ref(y) for y in results]
    assert len(kept) >= 3 and all(one() is not None for one in kept)
    del inputs, results
    assert [one() for one in kept] == [None] * len(kept)


@pytest.mark.parametrize(
    ("desc", "message"),
    [
        (MemoryDesc((5, 10)).submemory((3, 8), (1, 1)), r"begins 11 elements before the tensor's first.*at_start\(\)"),
        (MemoryDesc((3, 8), strides=(0, 1)), r"several elements lie in one place"),
    ],
)
def test_a_boundary_that_no_tensor_can_have_is_refused(desc, message):
    model, x = torch.nn.Linear(8, 8).eval(), torch.randn(3, 8)
    with pytest.raises(UnsupportedOpError, match=rf"boundary\['input'\] is .*{message}"):
        fp.compile(model, x, boundary={"input": desc})


@pytest.mark.parametrize("policy", ["optimal", "propagate"])
def test_an_output_may_have_gaps(policy):
    model, x = torch.nn.Linear(8, 8).eval(), torch.randn(3, 8)
    gaps = MemoryDesc((3, 8), strides=(20, 1))
    net = fp.compile(model, x, policy=policy, boundary={"output_1": gaps})
    torch.testing.assert_close(net(x), model(x))


# ---------------------------------------------------------------- arguments of the model, and of what measures it


class Measured(nn.Module):
    """Has arguments that are called as those of `benchmark` and `profile`."""

    def forward(self, x, runs, seconds, warmup, repeats):
        return x + runs + seconds + warmup + repeats


def test_arguments_of_the_model_are_not_taken_for_those_of_what_measures_it():
    x = torch.ones(3)
    net = fp.compile(Measured(), (x,) * 5)
    for given in ({"runs": x}, {"seconds": x}, {"warmup": x}, {"runs": 5}, {"warmup": 1}):
        with pytest.raises(fp.InputError, match=rf"{next(iter(given))}= is ambiguous, since the model has an argument"):
            net.benchmark(x, **given)
    with pytest.raises(fp.InputError, match="repeats= is ambiguous"):
        net.profile(x, x, x, x, repeats=x)
    assert net.benchmark(x, x, x, x, x).runs > 0
    assert len(net.profile(x, x, x, x, x)) == len(net.plan.steps)


class CumulativeSum(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, 1)


@pytest.mark.parametrize("model", [nn.Linear(4, 4), CumulativeSum()], ids=["native", "by PyTorch"])
@pytest.mark.parametrize("target", ["onednn", "mkldnn"])
def test_a_tensor_made_in_inference_mode_takes_results(target, model):
    net = fp.compile(model.eval(), torch.ones(2, 4), target=target)
    with torch.inference_mode():
        out = torch.empty(2, 4)
    assert net(torch.ones(2, 4), out=out) is out
    torch.testing.assert_close(out.clone(), net(torch.ones(2, 4)))


@pytest.mark.parametrize("target", ["onednn", "mkldnn"])
def test_writing_to_a_tensor_that_a_graph_saved_is_noticed(target):
    net = fp.compile(nn.ReLU(), torch.ones(3), target=target)
    y, w = torch.ones(3), torch.ones(3, requires_grad=True)
    product = w * y
    net(torch.ones(3), out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# ---------------------------------------------------------------- recording


def _make_fx(net, x, **options):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda a: net(a), **options)(x)


@pytest.mark.parametrize("target", ["onednn", "mkldnn"])
@pytest.mark.parametrize(
    ("record", "who"),
    [
        (lambda net, x: torch.jit.trace(lambda a: net(a), x, check_trace=False), "torch.jit.trace"),
        (_make_fx, "make_fx"),
        (lambda net, x: _make_fx(net, x, pre_dispatch=True), "make_fx"),
    ],
)
@pytest.mark.filterwarnings(
    *[f"ignore:.torch.jit.trace. is:{kind}" for kind in ("DeprecationWarning", "FutureWarning")]
)
def test_what_records_operators_is_refused(record, who, target):
    """It would record tensors that nobody writes."""
    x = torch.ones(2, 3)
    net = fp.compile(nn.Linear(3, 2).eval(), x, target=target)
    with pytest.raises(fp.InputError, match=f"cannot be recorded by {who}"):
        record(net, x)
    assert net(x).shape == (2, 2)


# ---------------------------------------------------------------- outputs with gaps


@pytest.mark.parametrize("policy", ["plain", "naive", "propagate", "optimal"])
@pytest.mark.parametrize("target", ["onednn", "mkldnn"])
@pytest.mark.parametrize("strides", [(1200, 50, 8, 1), (1152, 1, 192, 32)], ids=["rows", "channels_last"])
def test_an_output_has_the_strides_that_it_is_asked_for(strides, target, policy):
    module, x = nn.Conv2d(8, 24, 3).eval(), torch.randn(2, 8, 8, 8)
    desc = fp.MemoryDesc((2, 24, 6, 6), "f32", strides=strides)
    net = fp.compile(module, x, boundary={"output_1": desc}, target=target, policy=policy, tune="model")
    y = net(x)
    assert y.stride() == strides
    assert relative_error(y, module(x).detach()) < 1e-5
    out = torch.empty_strided((2, 24, 6, 6), strides)
    assert net(x, out=out) is out
    assert torch.equal(out, y)
