"""Every backward row of the table computes PyTorch's gradients, from a forward primitive as its hint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fmtprop import dnnl
from fmtprop.dnnl import Arg, NormFlags, spec_of
from fmtprop.errors import DnnlError
from tests.dnnl import test_recurrent
from tests.dnnl.support import Array, any_of, plain, run, tagged
from tests.dnnl.test_forward import F, check, rand, t

TRAIN = "forward_training"
AFFINE = NormFlags.USE_SCALE | NormFlags.USE_SHIFT


@dataclass
class Case:
    """A forward problem, its tensors, and the same in PyTorch.

    ``formats`` are how the problem asks for its operands, where that is not `any`.
    """

    kind: type[Any]
    tensors: dict[str, Array]
    function: Callable[..., Any]
    numbers: dict[str, Any] = field(default_factory=dict)
    props: tuple[str, ...] = ("backward_data",)
    formats: dict[str, dnnl.NativeDesc] = field(default_factory=dict)


def swapped(w: Any) -> Any:
    """PyTorch's weights of a transposed convolution."""
    return w.transpose(0, 1)


WEIGHTED = ("backward_data", "backward_weights")
IMAGE, ROWS = (2, 8, 4, 3), (3, 9)
FLAT = {"src": plain(ROWS), "dst": plain(ROWS)}
PLAIN = {"src": plain(IMAGE), "dst": plain(IMAGE)}
POOL: dict[str, Any] = {"kernel": (3, 2), "strides": (2, 2), "dilates": (0, 0), "pad_l": (1, 0), "pad_r": (1, 0)}
# The last row that a window of 3 would need is beyond an image of 8: pad_r follows from the shapes.
SLIDE: dict[str, Any] = {"strides": (2, 1), "dilates": (0, 0), "pad_l": (1, 0), "pad_r": (0, 0)}


def normalised(tensors: dict[str, Array], function: Callable[..., Any], tag: str, **numbers: Any) -> dict[str, Any]:
    desc = tagged(tensors["src"].shape, tag)
    formats = {"src": desc, "dst": desc}
    flags = AFFINE if "scale" in tensors else NormFlags.NONE
    props = ("backward",) if flags else ("backward_data",)
    numbers["flags"] = flags
    return {"tensors": tensors, "function": function, "formats": formats, "props": props, "numbers": numbers}


def affine(*shape: int, channels: int) -> dict[str, Array]:
    return {"src": rand(*shape), "scale": rand(channels, seed=2), "shift": rand(channels, seed=3)}


CASES = {
    "convolution": Case(
        dnnl.Convolution,
        {"src": rand(2, 6, 8, 7), "weights": rand(4, 6, 3, 2, seed=1), "bias": rand(4, seed=2)},
        lambda src, weights, bias: F.conv2d(src, weights, bias, stride=(2, 1), padding=(1, 0)),
        SLIDE,
        WEIGHTED,
    ),
    "grouped convolution": Case(
        dnnl.Convolution,
        {"src": rand(2, 8, 5, 5), "weights": rand(4, 2, 2, 3, 3, seed=1)},
        lambda src, weights: F.conv2d(src, weights.flatten(0, 1), stride=(2, 1), padding=(1, 0), groups=4),
        SLIDE | {"pad_r": (1, 0)},
        WEIGHTED,
    ),
    "deconvolution": Case(
        dnnl.Deconvolution,
        {"src": rand(2, 6, 5, 4), "weights": rand(8, 6, 3, 2, seed=1), "bias": rand(8, seed=2)},
        lambda src, weights, bias: F.conv_transpose2d(src, swapped(weights), bias, stride=(2, 1), padding=(1, 0)),
        SLIDE | {"pad_r": (1, 0)},
        WEIGHTED,
    ),
    "inner product": Case(
        dnnl.InnerProduct,
        {"src": rand(3, 5), "weights": rand(7, 5, seed=1), "bias": rand(7, seed=2)},
        lambda src, weights, bias: F.linear(src, weights, bias),
        props=WEIGHTED,
    ),
    "max pooling": Case(
        dnnl.Pooling,
        {"src": rand(2, 8, 7, 6)},
        lambda src: F.max_pool2d(src, (3, 2), (2, 2), (1, 0)),
        {"alg": "pooling_max", **POOL},
        formats={"src": plain((2, 8, 7, 6)), "dst": plain((2, 8, 4, 3))},
    ),
    "average pooling": Case(
        dnnl.Pooling,
        {"src": rand(2, 8, 7, 6)},
        lambda src: F.avg_pool2d(src, (3, 2), (2, 2), (1, 0), count_include_pad=False),
        {"alg": "pooling_avg_exclude_padding", **POOL},
        formats={"src": tagged((2, 8, 7, 6), "acdb"), "dst": tagged((2, 8, 4, 3), "acdb")},
    ),
    "lrn": Case(
        dnnl.Lrn,
        {"src": rand(2, 16, 4, 3)},
        lambda src: F.local_response_norm(src, 5, 1e-2, 0.75, 1.0),
        {"alg": "lrn_across_channels", "local_size": 5, "alpha": 1e-2, "beta": 0.75, "k": 1.0},
        formats={"src": plain((2, 16, 4, 3)), "dst": plain((2, 16, 4, 3))},
    ),
    **{
        f"batch normalization {tag}": Case(
            dnnl.BatchNormalization,
            **normalised(
                affine(4, 8, 3, 3, channels=8),
                lambda src, scale, shift: F.batch_norm(src, None, None, scale, shift, training=True, eps=1e-4),
                tag,
                epsilon=1e-4,
            ),
        )
        for tag in ("abcd", "acdb", "aBcd8b")
    },
    "layer normalization": Case(
        dnnl.LayerNormalization,
        **normalised(
            affine(3, 4, 20, channels=20),
            lambda src, scale, shift: F.layer_norm(src, (20,), scale, shift),
            "abc",
            epsilon=1e-5,
            mean=plain((3, 4)),
        ),
    ),
    "group normalization": Case(
        dnnl.GroupNormalization,
        **normalised(
            affine(2, 8, 4, 3, channels=8),
            lambda src, scale, shift: F.group_norm(src, 4, scale, shift),
            "abcd",
            epsilon=1e-5,
            groups=4,
        ),
    ),
    **{
        f"{name} normalization without scale": Case(
            kind, **normalised({"src": rand(2, 8, 4, 3)}, function, "abcd", epsilon=1e-5, **numbers)
        )
        for name, kind, function, numbers in (
            ("batch", dnnl.BatchNormalization, lambda src: F.batch_norm(src, None, None, training=True), {}),
            ("layer", dnnl.LayerNormalization, lambda src: F.layer_norm(src, (3,)), {"mean": plain((2, 8, 4))}),
            ("group", dnnl.GroupNormalization, lambda src: F.group_norm(src, 4), {"groups": 4}),
        )
    },
    "gelu": Case(
        dnnl.Eltwise, {"src": rand(*ROWS)}, lambda src: F.gelu(src), {"alg": "eltwise_gelu_erf"}, formats=FLAT
    ),
    "leaky relu": Case(
        dnnl.Eltwise,
        {"src": rand(*ROWS)},
        lambda src: F.leaky_relu(src, 0.1),
        {"alg": "eltwise_relu", "alpha": 0.1},
        formats=FLAT,
    ),
    "tanh by dst": Case(
        dnnl.Eltwise,
        {"src": rand(*ROWS)},
        lambda src: src.tanh(),
        {"alg": "eltwise_tanh_use_dst_for_bwd"},
        formats=FLAT,
    ),
    "prelu": Case(
        dnnl.Prelu,
        {"src": rand(*IMAGE), "weights": rand(1, 8, 1, 1, seed=1)},
        lambda src, weights: F.prelu(src, weights.flatten()),
        props=("backward",),
        formats=PLAIN,
    ),
    "softmax": Case(dnnl.Softmax, {"src": rand(*ROWS)}, lambda src: src.softmax(1), {"axis": 1}, formats=FLAT),
    "log softmax": Case(
        dnnl.Softmax,
        {"src": rand(*ROWS)},
        lambda src: src.log_softmax(1),
        {"alg": "softmax_log", "axis": 1},
        formats=FLAT,
    ),
    "shuffle": Case(
        dnnl.Shuffle,
        {"src": rand(2, 12, 4)},
        lambda src: src.reshape(2, 3, 4, 4).transpose(1, 2).reshape(2, 12, 4),
        {"axis": 1, "group_size": 4},
        formats={"src": plain((2, 12, 4)), "dst": plain((2, 12, 4))},
    ),
    **{
        f"{alg} resampling": Case(
            dnnl.Resampling,
            {"src": rand(*IMAGE)},
            lambda src, mode=mode: F.interpolate(src, scale_factor=2, mode=mode),
            {"alg": f"resampling_{alg}"},
            formats={"src": plain(IMAGE), "dst": plain((2, 8, 8, 6))},
        )
        for alg, mode in (("linear", "bilinear"), ("nearest", "nearest"))
    },
}


def forward_and_gradients(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return PyTorch's tensors, and the gradients of those that have one."""
    leaves = {name: t(array).clone().requires_grad_(True) for name, array in case.tensors.items()}
    dst = case.function(**leaves)
    diff = rand(*dst.shape, seed=9)
    dst.backward(t(diff))
    known = {**case.tensors, "dst": dst.detach().numpy(), "diff_dst": diff}
    return known, {f"diff_{name}": leaf.grad.numpy() for name, leaf in leaves.items()}


def problem_of(case: Case, prop: str, known: dict[str, Array]) -> Any:
    """Return the problem in a direction, each gradient in its tensor's format."""
    described = {
        name: case.formats.get(name.removeprefix("diff_"), any_of(known[name.removeprefix("diff_")].shape))
        for name in spec_of(case.kind.kind, prop).operands
        if name in case.kind.__dataclass_fields__ and name.removeprefix("diff_") in known
    }
    use_dst = case.numbers.get("alg", "").endswith("_use_dst_for_bwd")
    if case.kind is dnnl.Eltwise and prop == "backward_data":
        del described["src" if use_dst else "dst"]
    return case.kind(prop=prop, **(described | case.numbers))


def assert_complete(pd: dnnl.PrimitiveDesc, spec: dnnl.Spec) -> None:
    """Compare the row's operands with those that oneDNN names."""
    named = {int(arg) for arg in Arg if pd.arg_md(arg) is not None} - {int(Arg.SCRATCHPAD)}
    if spec.takes_hint and "normalization" in spec.kind:
        named -= {int(Arg.SCALE), int(Arg.SHIFT)}  # which execution may refuse all the same
    assert named <= set(spec.operands.values())


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    case = CASES[name]
    if case.kind is dnnl.GroupNormalization:
        if not dnnl.lib().has("group_normalization_backward_primitive_desc_create"):
            pytest.skip("needs oneDNN v3.3")
        if dnnl.lib().version < (3, 7):
            pytest.skip("oneDNN 3.6.2 computes another gradient; 3.13.2 is right")
    known, wanted = forward_and_gradients(case)
    hint = dnnl.create(problem_of(case, TRAIN, known))
    assert_complete(hint, spec_of(hint.kind, TRAIN))
    learned = [name for name in spec_of(hint.kind, TRAIN).results if hint.arg_md(Arg[name.upper()]) is not None]
    inputs = {Arg[name.upper()]: array for name, array in case.tensors.items()}
    arrays, raw = run(hint, inputs, tuple(Arg[name.upper()] for name in learned if name != "workspace"))
    known |= dict(zip((name for name in learned if name != "workspace"), arrays, strict=True))
    check(known["dst"], forward_and_gradients(case)[0]["dst"])
    for prop in case.props:
        spec = spec_of(hint.kind, prop)
        bwd = dnnl.create(problem_of(case, prop, known), hint=hint)
        taken = [name for name, number in spec.operands.items() if bwd.arg_md(number) is not None]
        assert_complete(bwd, spec)
        results = [name for name in taken if name in spec.results]
        assert results and f"--dir={'BWD' if prop.startswith('backward') else ''}" in bwd.repro
        workspace = {Arg.WORKSPACE: raw[Arg.WORKSPACE]} if "workspace" in taken else None
        assert (workspace is not None) == (name == "max pooling") or case.kind is dnnl.Lrn
        given = {Arg[n.upper()]: known[n] for n in taken if n not in spec.results and n != "workspace"}
        gradients, _ = run(bwd, given, tuple(Arg[n.upper()] for n in results), workspace)
        for result, array in zip(results, gradients, strict=True):
            check(array, wanted[result])


def test_every_backward_row_is_tested() -> None:
    tested = [spec_of(case.kind.kind, prop) for case in CASES.values() for prop in case.props]
    tested += [spec_of(case.kind.kind, "backward") for case in test_recurrent.CASES.values()]
    assert all(spec in tested for spec in dnnl.SPECS if spec.takes_hint)


def test_wrong_hints_are_refused() -> None:
    """oneDNN itself crashes on these."""
    src, dst = plain((2, 8, 7, 6)), plain((2, 8, 4, 3))
    pooling = dnnl.Pooling(src=src, dst=dst, alg="pooling_max", **POOL)
    inference = dnnl.create(pooling)
    other = dnnl.create(dnnl.Eltwise(prop=TRAIN, src=src, dst=src, alg="eltwise_relu"))
    gradient = replace(pooling, prop="backward_data", src=None, dst=None, diff_src=src, diff_dst=dst)
    for hint, given in ((None, "None"), (inference, r".*\(forward_inference\)"), (other, r".*eltwise.*")):
        message = rf"pooling_backward_.*hint must be the forward_training descriptor of the same pooling, not {given}"
        with pytest.raises(DnnlError, match=message):
            dnnl.create(gradient, hint=hint)


def test_gradients_keep_what_they_were_made_from() -> None:
    """The hint lives as long as a gradient's descriptor, which asks for it again when it walks."""
    case = CASES["convolution"]
    known, _ = forward_and_gradients(case)
    bwd = dnnl.create(problem_of(case, "backward_data", known), hint=dnnl.create(problem_of(case, TRAIN, known)))
    assert [pd.impl for pd in bwd.implementations()] and np.prod(known["src"].shape)
