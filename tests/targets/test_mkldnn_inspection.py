"""What PyTorch's mkldnn tensors look like, and their use as inputs in place."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import fmtprop as fp
from fmtprop.errors import InputError, LibraryError
from fmtprop.layout import MemoryDesc, unpack
from fmtprop.runtime.boundary import Boundary
from fmtprop.targets.mkldnn import inspection
from tests import processes

CONV = torch.ops.aten.mkldnn_convolution.default


def convolved(dims=(2, 16, 8, 8), outputs=32, kernel=3) -> torch.Tensor:
    """Return an mkldnn tensor in the format that PyTorch's own convolution chose."""
    x, w = torch.randn(dims), torch.randn(outputs, dims[1], kernel, kernel)
    return CONV(x.to_mkldnn(), w, None, [kernel // 2] * 2, [1, 1], [1, 1], 1)


@pytest.mark.parametrize("dims", [(3,), (4, 5), (2, 17, 5), (2, 17, 5, 7), (1, 2, 3, 4, 5)])
def test_fresh_tensors_are_row_major(dims):
    assert fp.inspect(torch.randn(dims).to_mkldnn()) == MemoryDesc(dims)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.int8, "s8"), (torch.uint8, "u8")]
)
def test_data_types(dtype, name):
    assert fp.inspect(torch.ones((2, 3, 4, 5)).to(dtype).to_mkldnn()) == MemoryDesc((2, 3, 4, 5), name)


@pytest.mark.parametrize("outputs", [32, 30, 7])
def test_what_is_read_describes_the_memory(outputs):
    tensor = convolved(outputs=outputs)
    desc = fp.inspect(tensor)
    assert desc.dims == tuple(tensor.shape) and desc.nbytes == torch.ops.mkldnn._nbytes(tensor)
    flat = inspection.bytes_of(tensor).view(torch.float32).numpy()
    assert np.array_equal(unpack(flat, desc), tensor.to_dense().numpy())


def test_memory_outlives_its_tensor():
    tensor = torch.arange(6.0).to_mkldnn()
    flat = inspection.bytes_of(tensor)
    del tensor
    assert flat.view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_groups_are_an_axis_of_packed_weights():
    packed = torch.ops.mkldnn._reorder_convolution_weight(
        torch.randn(32, 1, 3, 3), [1, 1], [1, 1], [1, 1], 32, [1, 32, 8, 8]
    )
    assert fp.inspect(packed).dims == (32, 1, 1, 3, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(2, 3), r"got one of layout torch.strided; the format of a strided tensor is fp.MemoryDesc\("),
        (torch.eye(2).to_sparse(), r"got one of layout torch.sparse_coo.*t.to_dense\(\)"),
        ([1.0], "reads PyTorch mkldnn tensors, got list"),
    ],
)
def test_other_tensors_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        fp.inspect(given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_NBYTES", 780, "does not know: an mkldnn tensor is described in 772 bytes, not 780"),
        ("_STRIDES", 8, r"does not know: .* takes 28 bytes for \(7,\), but its format"),
        ("_COUNT", 412, "does not know: packed weights|does not know: this mkldnn tensor"),
    ],
)
def test_another_version_of_the_blob_is_refused(monkeypatch, name, value, message):
    """As a PyTorch would be whose struct has other fields: the known tensors are not what they should be."""
    monkeypatch.setattr(inspection, name, value)
    inspection._check_version.cache_clear()
    try:
        with pytest.raises(LibraryError, match=message) as info:
            fp.inspect(torch.zeros(2, 3).to_mkldnn())
        assert "t.to_dense()" in str(info.value)
    finally:
        inspection._check_version.cache_clear()


def test_a_version_without_the_operator_is_refused(monkeypatch):
    monkeypatch.setattr(inspection, "_has", lambda name: name != "_nbytes")
    inspection._check_version.cache_clear()
    with pytest.raises(LibraryError, match=r"it has no torch.ops.mkldnn._nbytes"):
        fp.inspect(torch.zeros(2).to_mkldnn())
    inspection._check_version.cache_clear()


# ---------------------------------------------------------------- against the verbose log

PROBLEMS = [
    ((1, 3, 32, 32), 16, 3, 1, 1), ((1, 3, 33, 33), 32, 7, 2, 1), ((1, 16, 28, 28), 32, 1, 1, 1),
    ((2, 17, 9, 9), 19, 3, 1, 1), ((1, 32, 14, 14), 32, 3, 1, 32), ((1, 32, 14, 14), 64, 3, 2, 1),
    ((1, 64, 7, 7), 128, 1, 1, 1), ((1, 64, 7, 7), 64, 3, 1, 64), ((1, 48, 12, 12), 96, 1, 2, 1),
    ((1, 24, 10, 10), 24, 5, 1, 24), ((4, 8, 6, 6), 8, 3, 1, 1), ((1, 1, 16, 16), 8, 3, 1, 1),
    ((1, 40, 9, 7), 56, 3, 1, 1), ((1, 12, 8, 8), 12, 3, 1, 4), ((1, 128, 4, 4), 256, 1, 1, 1),
    ((3, 20, 5, 5), 30, 1, 1, 1), ((1, 96, 8, 8), 24, 1, 1, 1), ((1, 6, 20, 20), 10, 5, 1, 1),
    ((1, 256, 3, 3), 64, 3, 1, 1), ((1, 31, 11, 13), 33, 3, 2, 1),
]  # fmt: skip

PROGRAM = """
import sys
import torch
from fmtprop.targets.mkldnn import inspect
torch.manual_seed(0)
with torch.no_grad():
    for dims, outputs, kernel, step, groups in {problems}:
        x, w = torch.randn(dims), torch.randn(outputs, dims[1] // groups, kernel, kernel)
        print("==", flush=True)
        y = torch.ops.aten.mkldnn_convolution(
            x.to_mkldnn(), w, None, [kernel // 2] * 2, [step] * 2, [1, 1], groups
        )
        print("=>", "x".join(map(str, inspect(y).dims)), inspect(y).tag, flush=True)
"""


def run_verbose(code: str, **environment: str) -> list[str]:
    """Return what a program prints, with what the oneDNN inside PyTorch logs."""
    result = processes.run("-c", code, ONEDNN_VERBOSE="1", **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("isa", ["", "SSE41"])
def test_twenty_convolutions_read_as_in_the_verbose_log(isa):
    assert len(PROBLEMS) == 20
    logged: list[MemoryDesc] = []
    read: list[MemoryDesc] = []
    tag = ""
    for line in run_verbose(PROGRAM.format(problems=PROBLEMS), **({"ONEDNN_MAX_CPU_ISA": isa} if isa else {})):
        if "primitive,exec,cpu,convolution" in line:
            tag = re.search(r"dst:f32:[a-z]*:blocked:(\w+)", line).group(1)
        elif line.startswith("=>"):
            _, dims, found = line.split()
            sizes = tuple(map(int, dims.split("x")))
            logged.append(MemoryDesc(sizes, tag=tag))
            read.append(MemoryDesc(sizes, tag=found))
    assert len(read) == len(PROBLEMS)
    assert read == logged


RUN = """
import torch
import fmtprop as fp
for model in {models}:
    net = fp.compile(model, target="mkldnn", policy="propagate")
    x = net.random_inputs()
    print("== run", flush=True)
    for _ in range(2):
        net.run_flat(x)
    print("== end", flush=True)
    steps = [step for step in net.plan.steps if step.node.choice.impl.startswith("mkldnn::_convolution")]
    print(len(steps), flush=True)
"""


@pytest.mark.parametrize(
    ("models", "isa"),
    [
        (("residual", "concat"), ""),
        (("residual", "concat"), "SSE41"),
        pytest.param(("conv3d", "resnet50", "mobilenet_v2", "unet", "convnext_t"), "", marks=pytest.mark.slow),
        pytest.param(("resnet50", "mobilenet_v2", "vgg16"), "SSE41", marks=pytest.mark.slow),
    ],
)
def test_no_weights_are_reordered_in_a_run(models, isa):
    """After compilation, oneDNN's own log has no reorder of any kind: those of the plan are PyTorch copies."""
    lines = run_verbose(RUN.format(models=models), **({"ONEDNN_MAX_CPU_ISA": isa} if isa else {}))
    starts = [number for number, line in enumerate(lines) if line == "== run"]
    ends = [number for number, line in enumerate(lines) if line == "== end"]
    assert len(starts) == len(ends) == len(models)
    for start, end in zip(starts, ends, strict=True):
        executed = [line for line in lines[start:end] if ",exec,cpu," in line]
        assert [line for line in executed if ",reorder," in line] == []
        convolutions = [line for line in executed if re.search(r"cpu,(de)?convolution,", line)]
        assert len(convolutions) == 2 * int(lines[end + 1]) > 0
    assert any(",reorder," in line for line in lines[: starts[0]])  # the log has them where they are


# ---------------------------------------------------------------- into a model of the onednn target


def test_an_mkldnn_tensor_is_read_in_place():
    tensor = convolved()
    module = torch.nn.Conv2d(32, 16, 3)
    net = fp.compile(module, torch.randn(tensor.shape), boundary={"input": fp.inspect(tensor)}, policy="propagate")
    (port,) = Boundary.of(net.plan).inputs
    assert port.read(tensor).data_ptr() == torch.ops.mkldnn.data_ptr(tensor)
    assert net.plan.inputs[0][1] == fp.inspect(tensor)
    dense = tensor.to_dense()
    expected = module(dense)
    assert torch.allclose(net(tensor), expected, atol=1e-4)
    assert torch.allclose(net(dense), expected, atol=1e-4)  # blocked by a reorder first
    last = dense.to(memory_format=torch.channels_last).to_mkldnn()  # an mkldnn tensor of another format
    assert fp.inspect(last) == MemoryDesc(dense.shape) != fp.inspect(tensor)
    assert torch.allclose(net(last), expected, atol=1e-4)


def test_plain_boundaries_take_mkldnn_tensors_too():
    module = torch.nn.Conv2d(16, 8, 3)
    x = torch.randn(1, 16, 8, 8)
    net = fp.compile(module, x)
    fresh = x.to_mkldnn()
    (port,) = Boundary.of(net.plan).inputs
    assert port.read(fresh).data_ptr() == torch.ops.mkldnn.data_ptr(fresh)
    assert torch.allclose(net(fresh), module(x), atol=1e-5)
    blocked = CONV(fresh, torch.eye(16).reshape(16, 16, 1, 1), None, [0, 0], [1, 1], [1, 1], 1)
    assert torch.allclose(net(blocked), module(x), atol=1e-5)


def test_blocked_outputs_are_refused():
    with pytest.raises(fp.UnsupportedOpError, match=r"boundary\['output_1'\] is .*aBcd8b.*strides without blocks"):
        fp.compile("chain", boundary={"output_1": MemoryDesc((1, 32, 16, 16), tag="aBcd8b")})
    with pytest.raises(fp.UnsupportedOpError, match=r"boundary\['input'\] is .*it needs these dims and data type$"):
        fp.compile("chain", boundary={"input": MemoryDesc((1, 3, 8, 8), tag="aBcd8b")})


# ---------------------------------------------------------------- without a library

FALLBACK = """
import warnings
import torch
import fmtprop as fp
module = torch.nn.Conv2d(3, 8, 3)
x = torch.randn(1, 3, 8, 8)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    net = fp.compile(module, x)
print(len(seen), seen[0].category.__name__, seen[0].message)
print(net.options.target, torch.allclose(net(x), module(x), atol=1e-5), "inside PyTorch" in str(net.report(repeats=1)))
print(net.benchmark(runs=2).runs)
from fmtprop.cli.app import main
main(["doctor"])
"""


def test_without_a_library_pytorchs_own_runs_models():
    result = processes.run("-c", FALLBACK, FMTPROP_DNNL_LIBRARY="/nowhere/libdnnl.so.3")
    first, second, third, *doctor = result.stdout.splitlines()
    assert first.startswith("1 RuntimeWarning no oneDNN library can be loaded: the model runs on the oneDNN inside")
    assert second == "mkldnn True True" and third == "2"
    assert any(line.startswith("advice") and "falls back" in line and "target='mkldnn'" in line for line in doctor)
