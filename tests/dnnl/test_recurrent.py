"""The recurrent kinds compute what the same cells compute in PyTorch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from fmtprop import dnnl
from fmtprop.dnnl import Arg, RnnFlags, spec_of
from fmtprop.dnnl.recipe import benchdnn_line
from fmtprop.errors import UnsupportedOpError
from tests.dnnl.support import Array, any_of, plain, run
from tests.dnnl.test_forward import check, rand, t, torch

TIME, BATCH, INPUTS, STATES = 4, 3, 6, 5
Step = Callable[..., Any]


def vanilla(x: Any, state: tuple[Any, ...], w: Any, u: Any, bias: Any) -> tuple[Any, ...]:
    return ((x @ w + state[0] @ u + bias.flatten()).tanh(),)


def lstm(x: Any, state: tuple[Any, ...], w: Any, u: Any, bias: Any) -> tuple[Any, ...]:
    i, f, g, o = (x @ w + state[0] @ u + bias.flatten()).chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(x: Any, state: tuple[Any, ...], w: Any, u: Any, bias: Any) -> tuple[Any, ...]:
    h = state[0]
    update, reset, new = (x @ w + bias.flatten()).chunk(3, 1)
    by_update, by_reset, by_new = u.chunk(3, 1)
    z, r = (update + h @ by_update).sigmoid(), (reset + h @ by_reset).sigmoid()
    return (z * h + (1 - z) * (new + (r * h) @ by_new).tanh(),)


def lbr_gru(x: Any, state: tuple[Any, ...], w: Any, u: Any, bias: Any) -> tuple[Any, ...]:
    h = state[0]
    update, reset, new = (x @ w).chunk(3, 1)
    by_update, by_reset, by_new = (h @ u).chunk(3, 1)
    z, r = (update + by_update + bias[0]).sigmoid(), (reset + by_reset + bias[1]).sigmoid()
    return (z * h + (1 - z) * (new + bias[2] + r * (by_new + bias[3])).tanh(),)


@dataclass
class Case:
    kind: type[Any]
    step: Step
    gates: int
    biases: int
    states: tuple[str, ...] = ("iter",)
    numbers: dict[str, Any] = field(default_factory=dict)


CASES = {
    "vanilla": Case(dnnl.VanillaRnn, vanilla, 1, 1),
    "lstm": Case(dnnl.Lstm, lstm, 4, 4, ("iter", "iter_c")),
    "gru": Case(dnnl.Gru, gru, 3, 3),
    "lbr gru": Case(dnnl.LbrGru, lbr_gru, 3, 4),
    "lbr gru, backwards": Case(dnnl.LbrGru, lbr_gru, 3, 4, numbers={"direction": "unidirectional_right2left"}),
}


def tensors_of(case: Case) -> dict[str, Array]:
    """Return one layer's; its inputs and states have different sizes."""
    made = {
        "src_layer": rand(TIME, BATCH, INPUTS),
        "weights_layer": rand(1, 1, INPUTS, case.gates, STATES, seed=1),
        "weights_iter": rand(1, 1, STATES, case.gates, STATES, seed=2),
        "bias": rand(1, 1, case.biases, STATES, seed=3),
    }
    return made | {f"src_{name}": rand(1, 1, BATCH, STATES, seed=4 + i) for i, name in enumerate(case.states)}


def in_torch(case: Case, leaves: dict[str, Any]) -> dict[str, Any]:
    state = tuple(leaves[f"src_{name}"][0, 0] for name in case.states)
    w, u = (leaves[name][0, 0].flatten(1) for name in ("weights_layer", "weights_iter"))
    backwards = case.numbers.get("direction") == "unidirectional_right2left"
    found = {}
    for time in reversed(range(TIME)) if backwards else range(TIME):
        state = case.step(leaves["src_layer"][time], state, w, u, leaves["bias"][0, 0])
        found[time] = state[0]
    last = {f"dst_{name}": value[None, None] for name, value in zip(case.states, state, strict=True)}
    return {"dst_layer": torch.stack([found[time] for time in range(TIME)]), **last}


def problem_of(case: Case, prop: str, known: dict[str, Array]) -> Any:
    """Return the problem in a direction: oneDNN chooses the formats of weights and of their gradients."""
    described = {}
    for name in spec_of(case.kind.kind, prop).operands:
        tensor = name.removeprefix("diff_")
        if tensor in known and name in case.kind.__dataclass_fields__:
            described[name] = (any_of if tensor.startswith("weights") else plain)(known[tensor].shape)
    return case.kind(prop=prop, **described, **case.numbers)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    case = CASES[name]
    tensors = tensors_of(case)
    leaves = {name: t(array).clone().requires_grad_(True) for name, array in tensors.items()}
    wanted = in_torch(case, leaves)
    diffs = {f"diff_{name}": rand(*value.shape, seed=9) for name, value in wanted.items()}
    torch.autograd.backward(list(wanted.values()), [t(diff) for diff in diffs.values()])

    known = tensors | {name: value.detach().numpy() for name, value in wanted.items()} | diffs
    results = [name for name in spec_of(case.kind.kind, "forward_training").results if name in wanted]
    inputs = {Arg[name.upper()]: array for name, array in tensors.items()}
    for prop in ("forward_inference", "forward_training"):
        hint = dnnl.create(problem_of(case, prop, known))
        arrays, raw = run(hint, inputs, tuple(Arg[name.upper()] for name in results))
        for result, array in zip(results, arrays, strict=True):
            check(array, wanted[result].detach())
    assert "--prop=FWD_D" in hint.repro and hint.repro.endswith(f"l1t{TIME}mb3sic5slc6dhc5dic5")

    spec = spec_of(case.kind.kind, "backward")
    bwd = dnnl.create(problem_of(case, "backward", known), hint=hint)
    gradients = [name for name in spec.results if name.removeprefix("diff_") in tensors]
    assert len(gradients) == len(tensors)
    given = {Arg[name.upper()]: known[name] for name in spec.operands if name in known and name not in gradients}
    workspace = {Arg.WORKSPACE: raw[Arg.WORKSPACE]}
    arrays, _ = run(bwd, given, tuple(Arg[name.upper()] for name in gradients), workspace)
    for gradient, array in zip(gradients, arrays, strict=True):
        check(array, leaves[gradient.removeprefix("diff_")].grad)
    assert "--prop=BWD_DW" in bwd.repro


def test_both_directions() -> None:
    """PyTorch's own module, whose directions are side by side in the result."""
    module = torch.nn.LSTM(STATES, STATES, 1, bidirectional=True)
    x = rand(TIME, BATCH, STATES)
    want, _ = module(t(x))
    both = [
        torch.stack([getattr(module, f"{name}_l0{end}") for end in ("", "_reverse")])
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    # (directions, gates x states, inputs) -> (1, directions, inputs, gates, states)
    w, u = (v.detach().unflatten(1, (4, STATES)).permute(0, 3, 1, 2)[None].contiguous().numpy() for v in both[:2])
    bias = (both[2] + both[3]).detach().unflatten(1, (4, STATES))[None].contiguous().numpy()
    problem = dnnl.Lstm(
        src_layer=plain(x.shape),
        weights_layer=any_of(w.shape),
        weights_iter=any_of(u.shape),
        bias=plain(bias.shape),
        dst_layer=plain(tuple(want.shape)),
        direction="bidirectional_concat",
    )
    inputs = {Arg.SRC_LAYER: x, Arg.WEIGHTS_LAYER: w, Arg.WEIGHTS_ITER: u, Arg.BIAS: bias}
    (y,), _ = run(dnnl.create(problem), inputs, (Arg.DST_LAYER,))
    check(y, want.detach())


def test_lines() -> None:
    described: dict[str, Any] = {
        "src_layer": plain((TIME, BATCH, STATES)),
        "weights_layer": any_of((1, 1, STATES, 4, STATES)),
        "weights_iter": any_of((1, 1, STATES, 4, STATES)),
        "bias": plain((1, 1, 4, STATES)),
        "dst_layer": plain((TIME, BATCH, STATES)),
    }
    sizes = "--attr-scratchpad=user l1t4mb3sic5slc5dhc5dic5"
    cells = {f"{end}_iter{c}": plain((1, 1, BATCH, STATES)) for end in ("src", "dst") for c in ("", "_c")}
    peephole = dnnl.create(dnnl.Lstm(weights_peephole=plain((1, 1, 3, STATES)), **described, **cells))
    start = "benchdnn --rnn --prop=FWD_I --alg=VANILLA_LSTM --direction=left2right --cfg=f32"
    assert peephole.repro == f"{start} --with-peephole=true {sizes}"
    for name in ("weights_layer", "weights_iter"):
        described[name] = any_of((1, 1, STATES, 1, STATES))
    described |= {"direction": "unidirectional_right2left", "flags": RnnFlags.DIFF_WEIGHTS_OVERWRITE}
    simple = dnnl.VanillaRnn(activation="eltwise_relu", **described)
    start = "benchdnn --rnn --prop=FWD_I --alg=VANILLA_RNN --activation=RELU --direction=right2left --cfg=f32 --flags=O"
    assert benchdnn_line(simple, dnnl.PrimitiveAttr()) == f"{start} {sizes}"
    with pytest.raises(UnsupportedOpError, match=r"no direction of a recurrent layer 'right'; known: .*_left2right"):
        dnnl.create(dnnl.VanillaRnn(**{**described, "direction": "right"}))
