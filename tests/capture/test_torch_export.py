from __future__ import annotations

import dataclasses
import enum
import importlib
import linecache
import re
import warnings
from collections import deque, namedtuple
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._export import utils as export_utils
from torch.utils import _pytree as pytree

import fmtprop as fp
from fmtprop.capture import from_torch
from fmtprop.capture.call_import import importers
from fmtprop.capture.functionalising import functionalised
from fmtprop.capture.fx_import import origin_of
from fmtprop.errors import GraphError, ImportModelError, InputError
from fmtprop.ir import OPSET
from tests.capture.checking import check, compare, run
from tests.modules import Function

torch.manual_seed(0)
IMAGE = torch.randn(2, 3, 16, 16)
TOKENS = torch.randn(2, 5, 16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8, 4))

    def forward(self, x):
        x = self.act(self.drop(self.norm(self.conv(x))))
        x += 1
        return self.head(F.adaptive_avg_pool2d(x, 1))


# ---------------------------------------------------------------- modules of every kind

NATIVE = {
    "conv1d": (nn.Conv1d(3, 4, 3), torch.randn(2, 3, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, dilation=2), torch.randn(2, 4, 11, 11)),
    "conv3d": (nn.Conv3d(3, 4, 3, bias=False), torch.randn(1, 3, 6, 6, 6)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 2, stride=2), torch.randn(1, 4, 5, 5)),
    "linear": (nn.Linear(16, 8), TOKENS),
    "batch_norm": (nn.BatchNorm2d(3), IMAGE),
    "layer_norm": (nn.LayerNorm(16), TOKENS),
    "softmax": (nn.Softmax(-1), TOKENS),
    "log_softmax": (nn.LogSoftmax(1), TOKENS),
    "max_pool": (nn.MaxPool2d(3, 2, 1), IMAGE),
    "avg_pool": (nn.AvgPool2d(2), IMAGE),
    "global_pool": (nn.AdaptiveAvgPool2d(1), IMAGE),
    "relu": (nn.ReLU(), IMAGE),
    "hardswish": (nn.Hardswish(), IMAGE),
    "silu": (nn.SiLU(), IMAGE),
    "gelu": (nn.GELU(), IMAGE),
    "prelu": (nn.PReLU(3), IMAGE),
    "dropout": (nn.Dropout(0.9), IMAGE),
    "identity": (nn.Identity(), IMAGE),
    "flatten": (nn.Flatten(), IMAGE),
    "concat": (Function(lambda x: torch.cat([x, x + 1, 2 * x], 1)), IMAGE),
    "residual": (Function(lambda x: x + F.relu(x)), IMAGE),
    "chunk": (Function(lambda x: torch.chunk(x, 2, 1)[1] * torch.chunk(x, 2, 1)[0]), torch.randn(1, 6, 4)),
    "transpose": (Function(lambda x: x.transpose(1, 2).permute(2, 0, 1)), TOKENS),
    "matmul": (Function(lambda x: x @ x.transpose(1, 2)), TOKENS),
    "mean": (Function(lambda x: x.mean((2, 3))), IMAGE),
    "in-place": (Function(lambda x: (x * 1).add_(2).relu_()), IMAGE),
    "block": (Block(), IMAGE),
    "roll": (Function(lambda x: torch.roll(x, (1, 2), (2, 3))), IMAGE),
}


@pytest.mark.parametrize("name", NATIVE)
def test_modules_become_ops(name):
    module, example = NATIVE[name]
    check(module, example)


FALLBACK = {
    "cumsum": (Function(lambda x: x.cumsum(1)), IMAGE),
    "sort": (Function(lambda x: torch.sort(x, dim=1)), TOKENS),
    "topk": (Function(lambda x: torch.topk(x, 3)[1]), TOKENS),
    "complex product": (Function(lambda x: torch.einsum("bij,bkj->bik", x, x).tril()), TOKENS),
    "embedding": (nn.Embedding(10, 4), torch.tensor([[1, 2], [3, 9]])),
    "one result of two": (Function(lambda x: torch.max(x, 1).indices), TOKENS),
    "list of tensors": (Function(lambda x: torch.stack([x, x.cumsum(0)])), TOKENS),
    "index by tensors": (Function(lambda x: x[torch.tensor([0, 1]), :, torch.tensor([2, 3])]), IMAGE),
    "where": (Function(lambda x: torch.where(x > 0, x, torch.tensor(-1.0))), IMAGE),
    "f64": (nn.Conv2d(3, 4, 3).double(), IMAGE.double()),
    "integers": (Function(lambda x: (x * 3 + 1) // 2), torch.arange(10)),
    "booleans": (Function(lambda x: ~(x > 0) & (x < 1)), IMAGE),
    "cast": (Function(lambda x: x.to(torch.float64).to(torch.int64)), IMAGE),
}


@pytest.mark.parametrize("name", FALLBACK)
def test_what_has_no_op_runs_on_the_reference(name):
    module, example = FALLBACK[name]
    graph = check(module, example, aten=None)
    assert graph.count("aten") >= 1


class Transposed(nn.Module):
    """A parameter that is a transposed view."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x):
        return x + self.weight.as_strided((2, 2), (3, 1), 1)


CHANNELS_LAST = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
IN_STORAGE = {
    "row-major": (Function(lambda x: (x + 1).as_strided((2, 2), (3, 1), 1)), torch.randn(3, 4)),
    "transposed": (Function(lambda x: (x + 1).t().as_strided((2, 2), (3, 1), 1)), torch.randn(3, 4)),
    "transposed copy": (Function(lambda x: torch.as_strided_copy((x + 1).t(), (2, 2), (3, 1), 1)), torch.randn(3, 4)),
    "axis of one": (Function(lambda x: x.unsqueeze(1).transpose(0, 2).as_strided((5,), (2,))), torch.randn(3, 4)),
    "window without an offset": (Function(lambda x: (x + 1)[1:].as_strided((2, 2), (3, 1))), torch.randn(3, 4)),
    "channels-last": (Function(lambda x: (x * 2).as_strided((4, 5), (5, 1), 3)), CHANNELS_LAST),
    "parameter": (Transposed(), torch.randn(2, 2)),
    "scatter": (Function(lambda x, y: torch.as_strided_scatter(x, y, (2, 2), (3, 1), 1)),
                (torch.randn(3, 4), torch.randn(2, 2).t())),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_STORAGE)
def test_strides_in_a_storage_mean_what_they_mean_in_the_model(name):
    check(*IN_STORAGE[name], aten=1)


OUT_OF_STORAGE = {
    "window": (lambda x: (x + 1)[1:].as_strided((2, 2), (3, 1), 1), r"has strides \(4, 1\) and offset 4"),
    "columns": (lambda x: (x + 1)[:, :2].as_strided((2, 2), (3, 1), 1), r"has strides \(4, 1\) and offset 0"),
    "expanded": (lambda x: x[:1].expand(3, 4).as_strided((2, 2), (1, 1)), r"has strides \(0, 1\) and offset 0"),
    "scatter": (
        lambda x: torch.as_strided_scatter((x + 1).t(), x, (3, 4), (4, 1)),
        r"of its argument self,",
    ),
}


@pytest.mark.parametrize("name", OUT_OF_STORAGE)
def test_what_lies_beside_a_tensor_cannot_be_read(name):
    function, message = OUT_OF_STORAGE[name]
    with pytest.raises(ImportModelError, match=f"as_strided.*{message}.*call .clone"):
        from_torch(Function(function), torch.randn(3, 4))


def test_half_precision_modules_give_the_module_result():
    check(nn.Sequential(nn.Linear(16, 8), nn.ReLU()).half(), TOKENS.half(), aten=None, rtol=1e-3, atol=1e-3)
    check(nn.Sequential(nn.Linear(16, 8), nn.ReLU()).bfloat16(), TOKENS.bfloat16(), aten=None, rtol=2e-2, atol=2e-2)


def test_tensors_made_inside_become_constants():
    graph = check(Function(lambda x: x + torch.arange(16) + torch.zeros(16, 16)), IMAGE, aten=None)
    assert not [node for node in graph if not node.is_boundary and not graph.inputs(node.name)]


def test_scalar_result_and_scalar_input():
    graph = check(Function(lambda x, s: x.sum() * s), (IMAGE, torch.tensor(2.0)), aten=None)
    assert graph.output_nodes and graph.type_of(graph.inputs(graph.output_nodes[0].name)["src"]).dims == ()


# ---------------------------------------------------------------- names and origins


@pytest.mark.parametrize("argument", ["self", "fn", "this"])
def test_a_path_has_no_name_of_an_argument(argument):
    node = torch.fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"key": (f"L['{argument}'].layer[1].conv", nn.Conv2d)}
    assert origin_of(node) == "layer.1.conv"


def test_names_and_origins_come_from_the_model():
    graph = from_torch(nn.Sequential(Block()), IMAGE)
    assert graph.name == "Sequential"
    assert [node.name for node in graph.input_nodes] == ["input"]
    assert {"0.conv.weight", "0.conv.bias", "0.head.1.weight"} <= set(graph.constants)
    origins = {node.op: node.origin for node in graph if not node.is_boundary}
    assert origins["convolution"] == "0.conv" and re.match(
        r"0\.act|0 \(test_torch_export\.py:\d+\)", origins["eltwise"]
    )
    assert "relu_1" in graph and "conv_1" in graph
    assert from_torch(Block(), IMAGE, name="mine").name == "mine"


def test_unused_parameters_leave_no_constant():
    module = nn.Sequential(nn.Linear(16, 4))
    module.register_buffer("unused", torch.zeros(7))
    assert set(from_torch(module, TOKENS).constants) == {"0.weight", "0.bias"}


def test_tied_weights_are_one_constant():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    graph = check(Tied(), TOKENS)
    assert sum(name.endswith("weight") for name in graph.constants) == 1


def test_constants_of_one_storage_keep_their_own_sign():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.z = torch.complex(torch.randn(3, 3), torch.randn(3, 3))
            self.register_buffer("plus", self.z.imag)
            self.register_buffer("minus", self.z.conj().imag)
            self.register_buffer("one", self.z.conj().imag[:1, :1])

        def forward(self, x):
            return x * self.plus, x * self.minus, x * self.one

    graph = check(Parts(), torch.randn(3, 3))
    assert not any(data.is_neg() for data in graph.constants.values())


def test_a_parameter_may_be_called_as_an_input():
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return x * self.x

    graph = check(Clash(), TOKENS)
    assert graph.input_nodes[0].name == "x" and set(graph.constants) == {"x_1"}


def test_constants_are_dense_and_share_memory_where_they_can():
    module = nn.Linear(16, 4)
    module.bias = nn.Parameter(torch.ones(1).expand(4))
    graph = check(module, TOKENS)
    assert graph.constants["weight"].data_ptr() == module.weight.data_ptr()
    assert graph.constants["bias"].is_contiguous() and not graph.constants["bias"].requires_grad


def test_the_module_is_left_as_it_was():
    module = Block().train()
    module.norm.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    graph = from_torch(module, IMAGE)
    assert module.training and module.drop.training and not module.norm.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not [node for node in graph if "dropout" in str(node.attrs)]


# ---------------------------------------------------------------- arguments and results

Pair = namedtuple("Pair", "left right")


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x, masks, *rest, scale=2.0, mode=None):
        y = x * scale + masks["a"][0]
        return {"y": y, "pair": Pair(y, x), "list": [rest[1], None, 5], "w": (self.weight, self.table)}


def test_nested_arguments_and_results():
    masks = {"a": [torch.randn(16), 3]}
    args = (TOKENS, masks, torch.zeros(1), torch.ones(1))
    graph = check(Structured(), args, {"scale": 3.0})
    assert [node.name for node in graph.input_nodes] == ["x", "masks_a_0", "rest_0", "rest_1"]
    result = run(graph, TOKENS, masks, torch.zeros(1), torch.ones(1), scale=3.0)
    assert type(result["pair"]) is Pair and result["list"][1:] == [None, 5]
    with pytest.raises(InputError, match=r"scale: got 2.0, but the model was imported with 3.0"):
        run(graph, *args, scale=2.0)


class Keywords(nn.Module):
    def forward(self, x, first=None, second=None):
        return x + 2 * (0 if first is None else first) + 3 * (0 if second is None else second)


def test_positional_arguments_keep_the_order_of_forward():
    x, a, b = torch.randn(3, 4).unbind()
    graph = from_torch(Keywords(), x, kwargs={"second": b, "first": a})
    expected = Keywords()(x, a, b)
    for found in (run(graph, x, a, b), run(graph, x, second=b, first=a), run(graph, first=a, x=x, second=b)):
        compare(found, expected)


def test_an_argument_that_was_left_out_stays_out():
    x, b = torch.randn(2, 4).unbind()
    graph = from_torch(Keywords(), x, kwargs={"second": b})
    with pytest.raises(InputError, match="argument first: got a Tensor, but the model was imported with None"):
        run(graph, x, b, b)


def test_one_tensor_for_two_arguments_stays_two_inputs():
    x = torch.randn(4)
    graph = from_torch(Keywords(), (x, x, x))
    a, b, c = torch.randn(3, 4).unbind()
    compare(run(graph, a, b, c), Keywords()(a, b, c))


def test_outputs_may_be_inputs_constants_and_the_same_twice():
    module = Function(lambda x: (x, x, x * 2))
    graph = check(module, TOKENS)
    assert len(graph.output_nodes) == 3


class Box:
    """A container of tensors that only its maker knows."""

    def __init__(self, content):
        self.content = content


def test_tensors_in_containers_that_cannot_be_described_are_refused():
    pytree.register_pytree_node(
        Box, lambda box: ([box.content], None), lambda content, _: Box(*content), serialized_type_name="tests.Box"
    )
    in_box, in_deque = Function(lambda x: {"a": Box(x + 1)}), Function(lambda x: (x, deque([x + 1])))
    with pytest.raises(ImportModelError, match=r"a tensor of the model's results is in a .*\.Box.*use a tuple"):
        from_torch(in_box, TOKENS)
    with pytest.raises(ImportModelError, match=r"results is in a collections.deque"):
        from_torch(in_deque, TOKENS)
    with pytest.raises(ImportModelError, match=r"arguments is in a collections.deque"):
        from_torch(Function(lambda x: x[0] + 1), (deque([TOKENS]),))
    with pytest.raises(ImportModelError, match=r"example inputs: .*Box"):
        from_torch(Function(lambda x: x.content + 1), (Box(TOKENS),))
    check(Function(lambda x, fixed: (x + 1, fixed[0])), (TOKENS, deque([3])))


class Kind(enum.Enum):
    A = 1


def test_keys_that_a_graph_cannot_hold_are_refused():
    with pytest.raises(ImportModelError, match=r"has the key torch.float32 \(dtype\)"):
        from_torch(Function(lambda x: {torch.float32: x + 1}), TOKENS)
    with pytest.raises(ImportModelError, match=r"has the key <Kind.A: 1> \(Kind\)"):
        from_torch(Function(lambda x: x[Kind.A] + 1), ({Kind.A: TOKENS},))


def test_integer_and_boolean_inputs():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, ids, mask):
            return self.table(ids).masked_fill(mask[..., None], 0.0)

    ids = torch.tensor([[1, 2, 3]])
    graph = check(Masked(), (ids, ids > 1), aten=None)
    assert [str(node.results[0]) for node in graph.input_nodes] == ["s64[1,3]", "boolean[1,3]"]


def test_module_without_parameters_and_module_without_inputs():
    assert not check(nn.Identity(), TOKENS).constants

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self):
            return self.weight * 2

    graph = check(Table(), ())
    assert graph.input_nodes == []


# ---------------------------------------------------------------- exported programs


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_of_every_kind_import_the_same(strict):
    module = Block().eval()
    expected = module(IMAGE).detach()
    program = torch.export.export(module, (IMAGE,), strict=strict)
    for form in (program, program.run_decompositions({}), program.run_decompositions()):
        graph = from_torch(form)
        assert graph.name == "Block"
        compare(run(graph, IMAGE), expected)
        assert [node.origin for node in graph if node.op == "convolution"] == ["conv"]


class Composites(nn.Module):
    """Calls that stay whole, calls that do not, and a change in place of what is a view."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.InstanceNorm1d(5)

    def forward(self, x):
        heads = self.linear(self.norm(x)).unflatten(-1, (4, 4)).transpose(1, 2)
        heads[:, 0] += torch.einsum("bij,bkj->bik", heads[:, 1], heads[:, 2]).sum(-1, keepdim=True)
        return F.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape) @ torch.eye(16)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_a_program_is_made_functional_as_by_pytorch_and_its_operators_are_looked_up_once(monkeypatch):
    looked_up, honest = [], export_utils._materialize_cpp_cia_ops
    monkeypatch.setattr(export_utils, honest.__name__, lambda: looked_up.append(honest()))
    program = torch.export.export(Composites().eval(), (TOKENS,))
    expected = program.run_decompositions({})
    looked_up.clear()
    kernels = {op: set(op.py_kernels) for op in (torch.ops.aten.linear.default, torch.ops.aten.einsum.default)}
    assert functionalised(program).graph_module.code == expected.graph_module.code
    assert len(looked_up) == 1
    assert {op: set(op.py_kernels) for op in kernels} == kernels


def test_example_inputs_of_an_exported_program_are_checked():
    program = torch.export.export(Keywords(), (torch.zeros(4),), {"second": torch.zeros(4)})
    graph = from_torch(program, torch.zeros(4), kwargs={"second": torch.zeros(4)})
    a, b = torch.randn(2, 4).unbind()
    compare(run(graph, a, second=b), Keywords()(a, second=b))
    with pytest.raises(ImportModelError, match=r"argument 'second' is missing.*; or leave them out"):
        from_torch(program, torch.zeros(4))
    with pytest.raises(ImportModelError, match=r"input x: Keywords was imported for torch.float32 \(4,\)"):
        from_torch(program, torch.zeros(5), kwargs={"second": torch.zeros(4)})


# ---------------------------------------------------------------- errors


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x + self.count


class Moved(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(16.0))

    def forward(self, x):
        self.table = self.table.to(x.device)
        return x * self.table


def test_a_buffer_that_is_written_back_as_it_was():
    check(Moved(), (torch.randn(2, 16),))


class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class Controlled(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def _mutate(x):
    x.add_(1)
    return x * 2


REFUSED = {
    "state": (Stateful(), "changes its buffer 'count' at every call.* torch.compile"),
    "input mutation": (Function(_mutate), "modifies its input .*args_0.* in place.* torch.compile"),
    "control flow": (nn.Sequential(Controlled()), r"in 0 \(.*\.py:\d+\): control flow \(cond\) cannot be in a graph"),
    "data-dependent branch": (
        nn.Sequential(nn.ReLU(), Branching()),
        r"cannot export Sequential: 1 \(.*test_torch_export.py:\d+\) takes a branch .*torch.where .*draft_export",
    ),
    "data-dependent start": (
        Function(lambda x: x.narrow(0, x.sum().long(), 1)),
        r"cannot export Function: .* takes a branch or a size from a tensor's values",
    ),
    "shapes by numbers": (
        Function(lambda x: F.ctc_loss(x[:, None].log_softmax(-1), torch.ones(1, 1, dtype=torch.long), [len(x)], [1])),
        r"aten._ctc_loss.default's results .* outside of the module, or .* torch.compile\(model, backend=\"fmtprop\"",
    ),
    "random": (Function(lambda x: x + torch.rand_like(x)), "aten.rand_like.default draws random numbers"),
    "item": (Function(lambda x: x * x.sum().item()), "turns a tensor into a Python number"),
    "nonzero": (Function(lambda x: x[x > 0]), "shapes must be static"),
    "complex": (Function(lambda x: torch.fft.fft(x)), "output .* is torch.complex64; inputs and outputs are real"),
    "raises": (nn.Linear(3, 4), r"torch.export cannot export Linear: [\s\S]*Check that module"),
    "raises inside": (
        nn.Sequential(nn.ReLU(), Function(lambda x: x.view(7))),
        r"cannot export Sequential: RuntimeError\n.*invalid for input of size 160\n  in 1 \(.*modules.py:\d+\)\nCheck",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_graph_is_refused(name):
    module, message = REFUSED[name]
    with pytest.raises(ImportModelError, match=message):
        from_torch(module, TOKENS)


def test_a_failure_in_code_of_no_python_module_is_named():
    made = {"nn": nn}
    exec("class Branch(nn.Module):\n def forward(self, x):\n  return x if x.sum() > 0 else -x", made)
    with pytest.raises(ImportModelError, match=r"cannot export Branch: Branch \(<string>:3\) takes a branch"):
        from_torch(made["Branch"](), TOKENS)


def test_the_graph_of_a_failure_is_not_printed(capfd):
    with pytest.raises(ImportModelError, match="takes a branch"):
        from_torch(nn.Sequential(nn.ReLU(), Branching()), TOKENS)
    assert capfd.readouterr() == ("", "")


def test_programs_exported_for_training_are_refused():
    program = torch.export.export(Block().train(), (IMAGE,))
    with pytest.raises(ImportModelError, match=r"changes its buffer 'norm.*Export it in eval mode"):
        from_torch(program)


def _write_to_a_view(x):
    y = x + 1
    y.t().as_strided((2, 2), (3, 1), 1).add_(1)
    return y


def test_what_torch_cannot_make_functional_is_refused_with_its_reason():
    with pytest.raises(ImportModelError, match=r"functional: RuntimeError\n.*mutation on a view chain") as caught:
        from_torch(Function(_write_to_a_view), torch.randn(3, 4))
    assert isinstance(caught.value.__cause__, RuntimeError)
    program = torch.export.export(nn.Linear(3, 4), (torch.randn(2, 3),))
    program.state_dict.clear()
    with pytest.raises(ImportModelError, match="'weight' is missing from the exported program"):
        from_torch(program)


def test_weights_without_memory_are_refused_by_name():
    program = torch.export.export(nn.Linear(3, 4), (torch.randn(2, 3),))
    program.state_dict["bias"].untyped_storage().resize_(0)
    with pytest.raises(ImportModelError, match="constant 'bias' has no data: its memory was released"):
        from_torch(program)


def test_dynamic_shapes_are_refused_by_name():
    program = torch.export.export(nn.ReLU(), (IMAGE,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},))
    with pytest.raises(ImportModelError, match=r"input input: the size of axis 0 is not a number .* without dynamic"):
        from_torch(program)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (None, None, r"forward\(x, first=None, second=None\) cannot be called .*missing a required argument: 'x'"),
        ((TOKENS, TOKENS, TOKENS, TOKENS), None, "too many positional arguments"),
        (TOKENS, {"third": TOKENS}, "unexpected keyword argument 'third'"),
        (TOKENS.to("meta"), None, r"example input \[0\] is on device meta; fmtprop runs on the CPU"),
        (TOKENS.to_sparse(), None, "torch.sparse_coo tensor; only dense"),
        (TOKENS, {"first": TOKENS.numpy()}, r"\['first'\] is a numpy.ndarray; .* use torch.from_numpy"),
    ],
)
def test_wrong_example_inputs_are_named(args, kwargs, message):
    with pytest.raises(ImportModelError, match=message):
        from_torch(Keywords(), args, kwargs=kwargs)


def test_parameters_elsewhere_are_refused_by_name():
    with pytest.raises(ImportModelError, match=r"0.weight is on device meta; .*use .to\('cpu'\)"):
        from_torch(nn.Sequential(nn.Linear(16, 4, device="meta")), TOKENS)


def test_tensors_made_on_another_device_are_refused():
    with pytest.raises(ImportModelError, match=r"aten\.arange.*makes a tensor on device meta"):
        from_torch(Function(lambda x: (x * 1, torch.arange(3, device="meta"))), TOKENS)


def test_only_modules_are_imported():
    with pytest.raises(ImportModelError, match="got function; wrap a function in a module"):
        from_torch(lambda x: x, TOKENS)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, TOKENS)])
def test_torchscript_is_refused(make):
    with pytest.raises(ImportModelError, match=r"Linear is a TorchScript module.*import the nn.Module"):
        from_torch(make(nn.Linear(16, 4)), TOKENS)


def test_a_program_as_a_module_can_be_imported():
    program = torch.export.export(nn.Linear(16, 4), (TOKENS,))
    compare(run(from_torch(program.module(), TOKENS), TOKENS), program.module()(TOKENS).detach())


@pytest.fixture(scope="module")
def custom_ops():
    """Ops of a namespace of our own: one that is a function, one that changes its argument."""

    @torch.library.custom_op("fmtprop_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * 2, x.long()]

    twice.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)])

    @torch.library.custom_op("fmtprop_tests::double_", mutates_args=("x",))
    def double(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.clone()

    double.register_fake(torch.empty_like)
    return twice, double


def test_custom_ops_run_in_memory_and_in_no_file(custom_ops, tmp_path):
    model = Function(lambda x: custom_ops[0](x + 1))
    graph = from_torch(model, TOKENS)
    compare(run(graph, TOKENS), model(TOKENS))
    compare(fp.compile(model, TOKENS)(TOKENS), model(TOKENS))
    with pytest.raises(fp.GraphError, match=r"fmtprop_tests.twice.default cannot be called from a file's graph"):
        fp.save(graph, tmp_path / "graph.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ImportModelError, match=r"fmtprop_tests\.twice"):
        torch.export.save(torch.export.export(model, (TOKENS,)), tmp_path / "model.pt2")
        fp.load(tmp_path / "model.pt2")


def test_custom_ops_that_change_arguments_are_refused_by_name(custom_ops):
    with pytest.raises(ImportModelError, match=r"fmtprop_tests\.double_\.default changes its arguments in place"):
        from_torch(Function(lambda x: custom_ops[1](x + 1)), TOKENS)


def test_a_run_time_check_is_left_out_with_a_warning():
    def checked(x):
        torch.ops.aten._assert_async.msg((x > -9).all(), "too small")
        return x * 2

    with pytest.warns(UserWarning, match="run-time check aten._assert_async.msg is left out of the graph: inputs that"):
        graph = from_torch(Function(checked), TOKENS)
    compare(run(graph, TOKENS), TOKENS * 2)


class _Repeated(nn.Module):
    """Reads sizes and factors from tensors that do not depend on its input's numbers."""

    def forward(self, x):
        rows = torch.arange(x.shape[0]).max() + 1
        return torch.ones(x.shape[1]).repeat(rows, 1) * torch.tensor(9.0).sqrt().item() + x


@pytest.mark.parametrize("dynamic_shapes", [None, ({0: torch.export.Dim.DYNAMIC},)])
def test_a_number_that_no_input_decides_is_computed_during_the_import(dynamic_shapes):
    net = fp.compile(_Repeated(), torch.randn(3, 5), dynamic_shapes=dynamic_shapes)
    for rows in (3, 4) if dynamic_shapes else (3,):
        x = torch.randn(rows, 5)
        compare(net(x), _Repeated()(x))


def _counted(x, factor=None):
    number = (x > 0).sum().item()
    torch._check(number >= 0)
    torch._check(number <= x.numel())
    return x * (factor or number)


@pytest.mark.parametrize("dynamic_shapes", [None, ({0: torch.export.Dim("n", min=2, max=9)},)])
def test_a_run_time_check_of_a_number_is_left_out_with_a_warning(dynamic_shapes):
    message = r"^1 \(.*\.py:\d+\): run-time check of a number is left out of the graph: inputs that it would refuse "
    with pytest.warns(UserWarning, match=message):
        net = fp.compile(
            nn.Sequential(nn.ReLU(), Function(partial(_counted, factor=2))), TOKENS, dynamic_shapes=dynamic_shapes
        )
    compare(net(TOKENS), TOKENS.relu() * 2)


def test_a_number_that_nothing_reads_is_no_part_of_the_graph():
    graph = from_torch(Function(lambda x: (int(x.sum()), x * 2)[1]), TOKENS)
    compare(run(graph, TOKENS), TOKENS * 2)


def _written_at(x, at):
    made = x.clone()
    made[at], made[None, at, ..., 1:3] = x[0], 5.0
    made[..., at, 0].add_(x[:, at, 1])
    made[0, at, at] += 1
    return made, x[:, at, 1:], x[at % 2]


@pytest.mark.parametrize("position", [0, 1, -1])
def test_a_position_may_be_a_tensor(position):
    x, at = torch.randn(2, 3, 4), torch.tensor(position)
    model = Function(_written_at)
    net = fp.compile(model, (x, torch.tensor(0)))
    for got, expected in zip(net(x, at), model(x, at), strict=True):
        compare(got, expected)
    with pytest.raises(InputError, match=r"out of (range|bounds)"):
        net(x, torch.tensor(7))


def test_a_number_that_is_checked_and_used_is_refused():
    with pytest.raises(ImportModelError, match=r"aten.item.default turns a tensor into a Python number"):
        from_torch(Function(_counted), TOKENS)


# ---------------------------------------------------------------- importers


def test_no_overload_is_claimed_twice():
    table = importers()
    assert len(table) == sum(len(declaration.torch) for declaration in OPSET.values())


def test_a_second_claim_is_an_error(monkeypatch):
    monkeypatch.setitem(OPSET, "again", dataclasses.replace(OPSET["eltwise"], name="again"))
    with pytest.raises(GraphError, match=r"ops eltwise and again both import aten\."):
        importers()


def test_every_claimed_overload_exists():
    for module in ("fmtprop.training.capture", "torch.ao.quantization.fx._decomposed"):
        importlib.import_module(module)  # it and its imports register calls
    with suppress(ImportError):
        importlib.import_module("transformers.integrations.moe")
    for overload in importers():
        namespace, name, variant = overload.split(".")
        if namespace == "transformers" and not hasattr(torch.ops.transformers, name):
            continue  # the package is not installed
        assert hasattr(getattr(getattr(torch.ops, namespace), name), variant), overload


def test_an_importer_that_means_something_else_is_not_used(monkeypatch, caplog):
    def wrong(call):
        return call.emit("eltwise", {"src": call["input"]}, OPSET["eltwise"].attrs("relu"))

    op = OPSET["inner_product"]
    monkeypatch.setitem(op.torch, "aten.linear.default", wrong)
    module = nn.Linear(16, 4)
    graph = from_torch(module, TOKENS)
    said = "importer of op inner_product made result 0 as f32[2,5,16]"
    # no submodule, nothing to come from
    assert graph.count("aten") == 1 and f"aten.linear.default: {said}" in caplog.text
    from_torch(nn.Sequential(module), TOKENS)
    assert f"aten.linear.default from 0: {said}" in caplog.text
    compare(run(graph, TOKENS), module(TOKENS).detach())


def test_importing_raises_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_torch(Block(), IMAGE)


def test_what_a_program_makes_itself_is_computed_at_import():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 1))

        def forward(self, x):
            mask = x.new_ones(5, 5, dtype=torch.bool).tril() & (torch.arange(5) < 4)
            return (x * self.weight).masked_fill(mask[:, :1], 0.0) + torch.zeros_like(x)

    graph = check(Positions(), TOKENS, aten=None)
    assert [node.attrs.target for node in graph if node.op == "aten"] == ["aten.where.self"]
    assert "weight" in graph.constants


def test_keyword_examples_have_names():
    with pytest.raises(ImportModelError, match=r"kwargs must be a dict of example keyword inputs by name, got a list"):
        from_torch(nn.ReLU(), torch.ones(2), kwargs=[1])


def test_keys_and_strings_that_no_name_could_be():
    # torch would write them into source code, between quotes that they end
    for text in ("don't", 'say "x"', "a\\b"):
        check(Function(lambda inputs: sum(inputs.values())), ({text: TOKENS, "z": TOKENS},))
        check(Function(lambda x, how: x + len(how)), (TOKENS, text))


def test_an_exported_program_keeps_its_example_inputs():
    program = torch.export.export(nn.Linear(16, 4), (TOKENS,))
    from_torch(program)
    assert program.example_inputs[0][0] is not None


@pytest.mark.parametrize("key", ["class", 'a"b', "a\\b", "a\nb"])
def test_a_parameter_that_torch_cannot_write_is_named(key):
    module = nn.ModuleDict({key: nn.Linear(16, 4)})
    module.forward = lambda x: module[key](x)
    message = rf"'{re.escape(repr(key)[1:-1])}.weight' cannot be imported: .* rename it"
    with pytest.raises(ImportModelError, match=message):
        from_torch(module, TOKENS)
    with pytest.raises(ImportModelError, match=message):
        from_torch(torch.export.export(module, (TOKENS,)))


@pytest.mark.parametrize("key", ["a-b", "a b", "a/b", "a'b", "a(b", "größe", "0"])
def test_modules_may_have_odd_names(key):
    module = nn.ModuleDict({key: nn.Linear(16, 4)})
    module.forward = lambda x: module[key](x)
    assert f"{key}.weight" in from_torch(module, TOKENS).constants


@pytest.mark.parametrize("key", ["class", "a-b", 'a"b', "1a"])
def test_a_keyword_argument_that_torch_cannot_write_is_named(key):
    class Keywords(nn.Module):
        def forward(self, x, **more):
            return x + more[key]

    message = rf"the keyword argument '{key}' is not a Python identifier, .* in a dict"
    with pytest.raises(ImportModelError, match=message):
        from_torch(Keywords(), TOKENS, kwargs={key: TOKENS})
    if key not in ("class", "1a"):  # torch cannot even export those
        with pytest.raises(ImportModelError, match=message):
            from_torch(torch.export.export(Keywords(), (TOKENS,), {key: TOKENS}))


@pytest.mark.parametrize("pool", [F.max_pool1d, F.max_pool2d, F.max_pool3d])
def test_indices_of_maxima_run_as_aten_without_a_word(pool):
    x = IMAGE[0] if pool is F.max_pool1d else IMAGE
    graph = check(Function(lambda x: pool(x, 2, return_indices=True)), x, aten=None)
    assert graph.count("aten") > 0 and graph.count("pooling") == 0
    assert check(Function(lambda x: pool(x, 2, return_indices=True)[0]), x, aten=None).count("aten") == 0


def test_types_that_pytree_does_not_know_have_a_remedy():
    class Cache:
        def __init__(self, x):
            self.x = x

    message = r"Take and return tensors, .*'use_cache': False.*register_dataclass"
    with pytest.raises(ImportModelError, match=message):
        from_torch(Function(lambda x: Cache(x)), TOKENS)
    with pytest.raises(ImportModelError, match=message):
        from_torch(Function(lambda x, cache: x + cache.x), (TOKENS, Cache(TOKENS)))


def test_an_export_leaves_no_source_text_behind():
    # PyTorch keeps the text of each module that it writes: hundreds of compilations in a process would add up
    before = set(linecache.cache)
    from_torch(Function(lambda x: x.relu() + 1), TOKENS)
    added = set(linecache.cache) - before  # text of other tests may go at the same time, and files may be read
    assert not [name for name in added if name.startswith("<")]


class InPlaceBehindDropout(nn.Module):
    """A tensor that changes after dropouts that drop nothing have returned it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.cos()
        same = nn.functional.dropout(nn.functional.dropout(y, 0.3, training=self.training), p=0.0)
        y[0].add_(1)
        return same, y * 2


def test_a_dropout_that_is_off_is_its_source():
    module, x = InPlaceBehindDropout().eval(), torch.randn(3, 4)
    for net in (fp.compile(module, x), torch.compile(module, backend="fmtprop"), fp.compile(module, x, training=True)):
        for got, expected in zip(net(x), module(x), strict=True):
            torch.testing.assert_close(got, expected)
    program = torch.export.export(module, (x,))
    before = str(program.graph)
    torch.testing.assert_close(fp.compile(program)(x)[0], module(x)[0])
    assert str(program.graph) == before


class ChangedView(nn.Module):
    """The result of attention, a transposed view of a product, changed in place."""

    def __init__(self, change: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.attention(x, x, x)[0]
        self.change(found)
        return found + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.masked_fill_(y > 0, -1.0),
        lambda y: y[1:].cumsum_(1),
    ],
)
def test_a_transposed_view_may_change_in_place(change):
    # the functional forms return row-major tensors, which PyTorch cannot show as the product's
    module, x = ChangedView(change).eval(), torch.randn(3, 2, 3)
    torch._dynamo.reset()
    expected = module(x)
    for net in (fp.compile(module, x), torch.compile(module, backend="fmtprop"), fp.compile(module, x, training=True)):
        torch.testing.assert_close(net(x), expected)
    given = torch.randn_like(expected)
    found = torch.autograd.grad(net(x), list(module.parameters()), given)
    torch.testing.assert_close(found, torch.autograd.grad(module(x), list(module.parameters()), given))


class Normalized(nn.Module):
    """A view that PyTorch's rules for shapes refuse, but not its kernels: these make row-major results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm3d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.local_response_norm(self.norm(x), 4)


def test_an_example_may_have_any_strides():
    module, x = Normalized().eval(), torch.randn(5, 7, 2, 8, 3).permute(4, 3, 1, 2, 0)
    net = fp.compile(module, x)
    torch.testing.assert_close(net(x), module(x), rtol=1e-4, atol=1e-5)
