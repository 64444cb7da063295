"""Shapes by rule: the same as PyTorch's own, and none where PyTorch refuses the operands."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from fmtprop.ops.host_operator import binding_of
from fmtprop.ops.shape_rules import RULES, SEVERAL, together
from fmtprop.ops.without_data import result_of

ATEN = torch.ops.aten


def meta(*dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device="meta")


def turned(*dims: int) -> torch.Tensor:
    """Return a tensor whose last two axes are not in row-major order."""
    return meta(*dims[:-2], dims[-1], dims[-2]).mT


WRONG = torch.float64
SOURCES = [meta(2, 3, 4), turned(2, 3, 4), meta(2, 3, dtype=torch.bool), meta(2, 0)]
#: further arguments after the size
UPSAMPLING: dict[Any, tuple[Any, ...]] = {
    **{
        function: (None,)
        for function in (
            ATEN.upsample_nearest1d.vec,
            ATEN.upsample_nearest2d.vec,
            ATEN.upsample_nearest3d.vec,
            ATEN._upsample_nearest_exact2d.vec,
        )
    },
    **{
        function: (False, None)
        for function in (
            ATEN.upsample_linear1d.vec,
            ATEN.upsample_bilinear2d.vec,
            ATEN.upsample_trilinear3d.vec,
            ATEN.upsample_bicubic2d.vec,
            ATEN._upsample_bilinear2d_aa.vec,
            ATEN._upsample_bicubic2d_aa.vec,
        )
    },
}
CALLS: dict[Any, list[tuple[Any, ...]]] = {
    ATEN.conv1d.default: [
        (meta(2, 4, 9), w, b, *rest)
        for w, b in [(meta(6, 4, 3), None), (meta(6, 4, 3), meta(6)), (meta(6, 2, 3), meta(5)), (meta(6, 2, 3), None)]
        for rest in [(), ([2],), ([1], [1], [2]), ([2], [0], [1], 2), ([1], [0], [9]), ([0],)]
    ]
    + [(turned(2, 4, 9), meta(6, 4, 1), None)],
    ATEN.conv2d.default: [
        (src, weights, bias, *rest)
        for src in [meta(2, 4, 9, 8), turned(2, 4, 9, 8), meta(0, 4, 9, 8), meta(4, 9, 8), meta(2, 4, 2, 2)]
        for weights, bias in [
            (meta(6, 4, 3, 2), meta(6)),
            (meta(6, 2, 3, 2), None),
            (meta(6, 4, 3, 2, dtype=WRONG), None),
        ]
        for rest in [(), ([2, 1], [1, 0]), ([2], [1], [2]), ([1, 1], [0, 0], [1, 1], 2), ([1, 1], [-1, 0])]
    ],
    ATEN.conv3d.default: [
        (meta(2, 4, 5, 9, 8), meta(6, 4, 3, 2, 1), meta(6), *rest) for rest in [(), ([2, 1, 3], [1, 0, 2], [1, 2, 3])]
    ],
    ATEN.conv_transpose2d.input: [
        (src, weights, bias, *rest)
        for src in [meta(2, 4, 9, 8), turned(2, 4, 9, 8), meta(4, 9, 8)]
        for weights, bias in [(meta(4, 6, 3, 2), meta(6)), (meta(4, 3, 3, 2), None), (meta(5, 6, 3, 2), None)]
        for rest in [(), ([2, 1], [1, 0]), ([2], [1], [1]), ([2, 2], [0, 0], [1, 1], 2), ([1], [0], [2]), ([1], [9])]
    ],
    ATEN.linear.default: [
        (src, weights, bias)
        for src in [meta(2, 5, 8), turned(2, 5, 8), meta(5, 8), meta(8), meta(2, 5, 7), meta(0, 8)]
        for weights, bias in [(meta(3, 8), None), (meta(3, 8), meta(3)), (meta(8, 3).T, meta(4)), (meta(8), None)]
    ],
    ATEN.cat.default: [
        (tensors, axis)
        for tensors in [
            [meta(2, 3, 4), meta(2, 5, 4)],
            [meta(2, 3, 4)],
            [meta(2, 3, 4), turned(2, 3, 4)],
            [meta(2, 3, 8, 8)[:, :, ::2, ::2], meta(2, 3, 4, 4)],
            [meta(2, 4, 4, 3).permute(0, 3, 1, 2), meta(2, 3, 4, 4)],
            [meta(2, 3), meta(2, 3, 1)],
            [meta(2, 3, 4), meta(2, 3, 4, dtype=WRONG)],
            [meta(2, 0, 4), meta(2, 3, 4)],
            [meta(0), meta(2, 3, 4)],
            [],
            [meta(2, 3, 4, dtype=torch.int64), meta(2, 3, 4, dtype=torch.int64)],
            [meta(), meta()],
            [meta(3), meta(4)],
        ]
        for axis in (0, 1, -2, 3)
    ],
    ATEN.matmul.default: list(
        product(
            [meta(5, 8), meta(2, 5, 8), turned(3, 2, 5, 8), meta(2, 1, 5, 8), meta(8), meta(0, 5, 8)],
            [
                meta(8, 3),
                meta(2, 8, 3),
                turned(2, 8, 3),
                meta(1, 8, 3),
                meta(4, 8, 3),
                meta(7, 3),
                meta(8, 3, dtype=WRONG),
            ],
        )
    ),
    **{
        function: [
            (src, *rest)
            for src in [meta(2, 4, 9, 8), turned(2, 4, 9, 8), meta(4, 9, 8), meta(2, 4, 1, 1)]
            for rest in [
                *[([3, 2],), ([3],), ([3, 2], [2, 1], [1, 1]), ([3, 2], [], [1, 0]), ([2, 2], [2], [2, 2])],
                *[(kernel, [stride], [1], *spread, True) for kernel in ([3, 2], [2]) for stride in (2, 3, 5, 9)],
            ]
        ]
        for function, spread in ((ATEN.max_pool2d.default, ([1],)), (ATEN.avg_pool2d.default, ()))
    },
    ATEN.adaptive_avg_pool2d.default: [
        (meta(2, 4, 9, 8), [1, 1]),
        (turned(2, 4, 9, 8), [3, 2]),
        (meta(4, 9, 8), [1, 1]),
    ],
    ATEN.embedding.default: list(
        product(
            [meta(9, 4), meta(4), meta(9, 4, dtype=torch.int64)],
            [meta(2, 3, dtype=torch.int64), meta(dtype=torch.int32), meta(2, dtype=torch.float32)],
        )
    ),
    ATEN.index_select.default: [
        (src, axis, index)
        for src in [meta(2, 3, 4), turned(2, 3, 4), meta(2, 3, dtype=torch.int64)]
        for axis in (0, -1, 3)
        for index in [meta(5, dtype=torch.int64), meta(2, 2, dtype=torch.int64), meta(2)]
    ],
    ATEN.gather.default: [
        (src, axis, index)
        for src in [meta(2, 3, 4), turned(2, 3, 4), meta(2, 3, 4, dtype=torch.bool), meta(2, 0, 4)]
        for axis in (0, -1, 3)
        for index in [
            meta(2, 3, 9, dtype=torch.int64),
            meta(7, 3, 2, dtype=torch.int64),
            meta(2, 4, 4, dtype=torch.int64),
            meta(2, 3, dtype=torch.int64),
            meta(2, 3, 4),
        ]
    ],
    ATEN.index.Tensor: [
        (src, indices)
        for src in [meta(2, 3, 4), turned(2, 3, 4), meta(2, 0, 4), meta(2, 3, 4, 5), meta(2, 3, dtype=torch.bool)]
        for indices in [
            [],
            [meta(5, dtype=torch.int64)],
            [None, meta(5, 1, dtype=torch.int32)],
            [meta(5, 1, dtype=torch.int64), meta(7, dtype=torch.int64)],
            [None, meta(5, 1, dtype=torch.int64), meta(7, dtype=torch.int64)],
            [meta(5, 1, dtype=torch.int64), None, meta(7, dtype=torch.int64)],
            [meta(dtype=torch.int64), None, None, meta(3, dtype=torch.int64)],
            [None, meta(dtype=torch.int64)],
            [meta(5, dtype=torch.int64), meta(7, dtype=torch.int64)],
            [turned(2, 3, 4).long()[0]],
            [meta(1, 5, dtype=torch.int64).expand(2, 5), meta(2, 1, dtype=torch.int64)],
            [None, meta(1, 5, dtype=torch.int64).expand(2, 5)],
            [meta(0, dtype=torch.int64)],
            [meta(2)],
        ]
    ],
    **{
        function: [
            (src, *rest)
            for src in [meta(2, 3, 4), turned(2, 3, 4), meta(2, 3, 4, dtype=torch.int64), meta(2, 0, 4)]
            for rest in [([1],), ([-1, 0], True), ([0, 1, 2],), ([],), ([3],), ([1, -2],), ([2], True)]
        ]
        for function in (ATEN.mean.dim, ATEN.sum.dim_IntList, ATEN.amax.default, ATEN.amin.default)
    },
    **{
        function: [
            (src, size, *rest)
            for src in [meta(2, 3, 4, 5), turned(2, 3, 4, 5), meta(2, 3, 4)]
            for size in ((8, 9), (8,), None)
        ]
        for function, rest in UPSAMPLING.items()
        if "2d" in str(function)
    },
    **{
        function: [
            (src, size, *rest[:-1], scales)
            for src in [meta(2, 3, *(4, 5, 6)[:axes]), meta(2, 3)]
            for size, scales in (((7,) * axes, None), (None, [1.7] * axes), (None, [2.0] * (axes + 1)))
        ]
        for function, rest in UPSAMPLING.items()
        if (axes := int(str(function).partition("d")[0][-1])) != 2
    },
    **{
        function: [
            (src, grid, 0, 0, False)
            for src in [meta(2, 3, 4, 5), turned(2, 3, 4, 5), meta(2, 3, 4, 5, 6)]
            for grid in [meta(2, 7, 8, 2), meta(1, 7, 8, 2), meta(2, 7, 8, 3), meta(2, 7, 8, 2, dtype=WRONG)]
        ]
        for function in (ATEN.grid_sampler.default, ATEN.grid_sampler_2d.default)
    },
    ATEN.im2col.default: list(
        product(
            [meta(2, 3, 8, 9), turned(2, 3, 8, 9), meta(3, 8, 9)],
            [[3, 2], [9, 9]],
            [[1, 1], [2, 1]],
            [[1, 0]],
            [[2, 1]],
        )
    ),
    ATEN.flip.default: list(product([meta(2, 3, 4), turned(2, 3, 4)], [[0], [-1, 0], [0, 0], [3], []])),
    **{
        function: list(product([meta(2, 3, 4), turned(2, 3, 4), meta(4), meta(2, 0)], [0, -7]))
        for function in (ATEN.tril.default, ATEN.triu.default)
    },
    **{
        function: [
            (src, axis, index, *values)
            for src in [meta(2, 3, 4), turned(2, 3, 4), meta(2, 3, 4, dtype=torch.int64)]
            for axis in (0, -1, 3)
            for index in [meta(2, 3, 9, dtype=torch.int64), meta(2, 2, 3, dtype=torch.int64), meta(2, 3, 4)]
            for values in others
        ]
        for function, others in (
            (ATEN.scatter.value, [(1,)]),
            (ATEN.scatter.src, [(meta(2, 3, 9),), (meta(2, 3, 2),), (meta(2, 3, 9, dtype=torch.int64),)]),
            (ATEN.scatter_add.default, [(meta(2, 3, 9),), (meta(2, 3, 2),), (meta(2, 3, 9, dtype=torch.int64),)]),
        )
    },
    ATEN.index_put.default: [
        (meta(2, 3, 4), indices, values, accumulate)
        for indices in ([meta(5, dtype=torch.int64)], [None, meta(5, dtype=torch.int64)], [meta(5)])
        for values in [meta(), meta(5, 3, 4), meta(2, 5, 4), meta(9, 5, 3, 4), meta(dtype=torch.int64)]
        for accumulate in (False, True)
    ],
    ATEN.stack.default: list(
        product(
            [[meta(2, 3), meta(2, 3)], [meta(2, 3), meta(2, 4)], [turned(2, 3)], [meta(), meta()], []], [0, -1, -3, 3]
        )
    ),
    ATEN.histc.default: list(product([meta(2, 3), meta(5, dtype=torch.int64)], [7, 0], [0], [3])),
    **{
        function: list(
            product(
                [meta(2, 3, 4), turned(2, 3, 4), meta(2, 0), meta(2, dtype=torch.int64)],
                [None, 0, -1, 3],
                [False, True],
            )
        )
        for function in (ATEN.argmax.default, ATEN.argmin.default)
    },
    **{
        function: [(src, axis, keepdim) for src in SOURCES for axis in (0, -1, 3) for keepdim in (False, True)]
        for function in (ATEN.any.dim, ATEN.all.dim)
    },
    **{function: [(src,) for src in SOURCES] for function in (ATEN.any.default, ATEN.all.default)},
    ATEN.linalg_vector_norm.default: list(product(SOURCES, [2, 1.5], [None, [0], [-1, 0], [3]], [False, True])),
    ATEN.logsumexp.default: list(product(SOURCES, [[0], [-1, 0], [3]], [False, True])),
    **{
        function: list(product(SOURCES, [None, [0], [-1, 0], [3]]))
        for function in (ATEN.var.correction, ATEN.std.correction)
    },
    **{
        function: list(product(SOURCES, [None, [0], [-1, 0], [3]], [False, True], [False, True]))
        for function in (ATEN.var.dim, ATEN.std.dim)
    },
    **{
        function: [
            (src, *rest)
            for src in [meta(2, 3, 4), turned(2, 3, 4), meta(2, dtype=torch.int64)]
            for rest in [(-1,), (0,), (3,), (0, torch.float64)]
        ]
        for function in (ATEN.softmax.int, ATEN.log_softmax.int)
    },
    ATEN.batch_norm.default: [
        (src, *[factor] * 4, training, 0.1, 1e-5, False)
        for src in [meta(2, 3, 4, 4), turned(2, 3, 4, 4), meta(2, 3), meta(3)]
        for factor in [meta(3), meta(4), meta(3, dtype=WRONG)]
        for training in (False, True)
    ],
    ATEN.layer_norm.default: [
        (src, dims, factor, factor, 1e-5)
        for src in [meta(2, 3, 4), turned(2, 3, 4)]
        for dims in ([4], [3, 4], [3], [])
        for factor in [None, meta(4), meta(3, 4), meta(4, dtype=WRONG)]
    ],
    ATEN.reshape.default: list(
        product(
            [meta(2, 3, 4), turned(2, 3, 4), meta(2, 0, 4), meta(6, 4, dtype=torch.bool)],
            [[6, 4], [-1], [4, -1, 2], [-1, -1], [5, -1], [-2], [0, -1], [25]],
        )
    ),
}


def test_each_rule_has_calls():
    assert set(CALLS) == set(RULES)


@pytest.mark.parametrize("function", list(CALLS), ids=str)
def test_a_rule_gives_the_result_of_pytorch(function):
    answered = 0
    for args in CALLS[function]:
        dims = RULES[function](*args)
        if dims is None:
            continue
        answered += 1
        wanted = function(*args)  # does not raise: a rule answers for valid operands only
        if (binding := binding_of(function)) is not None:
            bound = binding(*args)  # nor does this: a call with a rule is not tried before it is bound
            assert (bound.shape, bound.dtype) == (wanted.shape, wanted.dtype)
        made = result_of(function, args, {})
        names = [argument.name for argument in function._schema.arguments]
        named = result_of(function, args[:1], dict(zip(names[1:], args[1:], strict=False)))
        assert (named.shape, named.dtype) == (made.shape, made.dtype)
        told = f"{function}({[getattr(at, 'shape', at) for at in args]})"
        assert (list(wanted.shape), wanted.dtype, wanted.stride()) == (dims, made.dtype, made.stride()), told
    assert answered > 0


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (ATEN.where.ScalarOther, (meta(2, 1, dtype=torch.bool), meta(3, dtype=torch.bfloat16), 0.5), {}),
        (ATEN.where.ScalarSelf, (meta(2, 1, dtype=torch.bool), 1, meta(3, dtype=torch.int32)), {}),
        (ATEN.where.Scalar, (meta(2, 1, dtype=torch.bool), 1, 0.5), {}),
        (ATEN.cumsum.default, (meta(2, 3, dtype=torch.int32), -1), {}),
        (ATEN.cumsum.default, (meta(2, 3), 0), {"dtype": torch.float64}),
        (ATEN.floor_divide.default, (meta(2, 1, dtype=torch.int64), meta(3, dtype=torch.int32)), {}),
        (ATEN.rsub.Tensor, (meta(2, 1, dtype=torch.int64), meta(3)), {"alpha": 2}),
        (ATEN.hardswish.default, (meta(2, 1),), {}),
        (ATEN.bitwise_and.Tensor, (meta(2, 1, dtype=torch.bool), meta(3, dtype=torch.bool)), {}),
    ],
    ids=str,
)  # fmt: skip
def test_results_have_the_shape_of_the_operands_together(function, args, kwargs):
    wanted = function(*args, **kwargs)
    for by in (None, binding_of(function)):
        made = result_of(function, args, kwargs, by)
        assert (made.shape, made.dtype, made.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN])
def test_recurrent_layers_have_the_results_of_pytorch(cell, bidirectional, batch_first):
    layer = cell(5, 4, 2, bidirectional=bidirectional, batch_first=batch_first).to("meta")
    function = {"GRU": ATEN.gru.input, "LSTM": ATEN.lstm.input, "RNN": ATEN.rnn_tanh.input}[cell.__name__]
    state, rest = meta(2 * (1 + bidirectional), 3, 4), (True, 2, 0.0, False, bidirectional, batch_first)
    states = [state, state] if cell is torch.nn.LSTM else state
    parameters = [parameter.detach() for parameter in layer.parameters()]
    src = meta(3, 7, 5) if batch_first else meta(7, 3, 5)
    wanted, made = function(src, states, parameters, *rest), SEVERAL[function](src, states, parameters, *rest)
    bound = binding_of(function)(src, states, parameters, *rest)
    assert [list(one.shape) for one in wanted] == [list(one.shape) for one in bound] == made
    assert SEVERAL[function](src, states, parameters[:-1], *rest) is None
    assert SEVERAL[function](meta(7, 3, 6), states, parameters, *rest) is None


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (function, (src, *rest))
        for src in (meta(2, 3, 4), turned(2, 3, 4), meta(2, 3, dtype=torch.int64))
        for function, others in (
            (ATEN.sort.default, [(), (0, True), (3,)]),
            (ATEN.topk.default, [(2,), (3, 1), (9,), (2, -1, True, False)]),
        )
        for rest in others
    ],
    ids=str,
)
def test_orders_have_the_results_of_pytorch(function, args):
    dims = SEVERAL[function](*args)
    if dims is None:
        return
    wanted, made, bound = function(*args), result_of(function, args, {}), binding_of(function)(*args)
    names = [argument.name for argument in function._schema.arguments]
    named = result_of(function, args[:1], dict(zip(names[1:], args[1:], strict=False)))
    for results in (made, named, bound):
        assert [(at.shape, at.dtype, at.stride()) for at in results] == [
            (at.shape, at.dtype, at.stride()) for at in wanted
        ]


def test_shapes_that_do_not_broadcast_are_an_error():
    assert together([(2, 1), (), (3,)]) == [2, 3]
    with pytest.raises(ValueError, match=r"shapes \[2, 3\], \[4\] do not broadcast along axis 1"):
        together([(2, 3), (4,)])
