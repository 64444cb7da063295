"""Random models with five shapes each, by three doors: exported, behind ``torch.compile`` and as an ONNX file.

Owns which sizes change, and the comparison of each call with eager PyTorch and, for exported models, of a later
shape's plan with one that is made for that shape alone. See :mod:`tests.models.fuzz`.
"""

from __future__ import annotations

import io
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import Any

import torch
from torch.export import Dim

import fmtprop as fp
from fmtprop.errors import FmtpropError, InputError
from tests.models import fuzz
from tests.models.fuzz import Model, Program, fresh

#: what a later shape's plan may cost over one for that shape alone; of smaller plans, calls are most of the cost
_MOST_RATIO, _SMALLEST_SECONDS = 1.1, 1e-4

Inputs = list[torch.Tensor]


def check_shapes(program: Program, seed: int) -> str | None:
    """Return the error of a program's plans for five shapes, None if all is well.

    Parameters
    ----------
    program : Program
        Drawn for inference.
    seed : int
        Chooses the sizes that change, and the options.
    """
    rng = random.Random(f"shapes {seed}")
    model = Model(program).eval()
    changing = _changing(model, rng)
    if changing is None:
        return None
    axis, size, calls = changing
    replan = rng.choice(["now", "background", "never"])
    for door in (_exported, _captured, _file):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = door(model, calls, axis, size, replan)
                wrong = run and _first_wrong(model, run, calls)
        except Exception as error:
            return f"{door.__name__}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
        finally:
            torch._dynamo.reset()
        if wrong:
            return f"{door.__name__}: {wrong}, axis {axis} of {size}, replan={replan}"
    return None


def _first_wrong(model: Model, run: Callable[..., Any], calls: Sequence[Inputs]) -> str | None:
    for number, inputs in enumerate([*calls, *calls[1:]]):
        given, changed = ([t.clone() for t in inputs] for _ in range(2))
        with torch.no_grad():
            expected = model(*changed)
        got = run(*given)
        if not fuzz.is_finite(expected):
            continue
        wrong = fuzz.differ(fuzz.without_ties(model.program, list(inputs), got, expected), expected)
        if wrong and not fuzz.is_noise(model, list(inputs), expected) and not fuzz.is_wrong(model, inputs, expected):
            return f"{wrong}; call {number}, shapes {[tuple(t.shape) for t in inputs]}"
        # a view in place of a copy may be changed by the model, but not by a file's session
        if not any(all(map(torch.equal, given, others)) for others in (inputs, changed)):
            return "an input was changed in another way than by the model"
    return None


# ---------------------------------------------------------------- sizes


def _changing(model: Model, rng: random.Random) -> tuple[int, int, list[Inputs]] | None:
    """Return an axis, the size that changes wherever an input has it there, and five calls; None if PyTorch refuses."""
    first = [fresh(t, 1) for t in model.program.inputs.values()]
    axes = sorted({(axis, size) for t in first for axis, size in enumerate(t.shape) if size})
    for axis, size in rng.sample(axes, min(len(axes), 6)):
        sizes = [size * 2, size + 1, size + rng.choice([2, 3, 5]), *([size - 1] if size > 2 else [size + 7])]
        calls = [first, *([_resized(t, axis, size, other, seed) for t in first] for seed, other in enumerate(sizes, 2))]
        if all(_runs(model, inputs) for inputs in calls):
            return axis, size, calls
    return None


def _resized(tensor: torch.Tensor, axis: int, size: int, other: int, seed: int) -> torch.Tensor:
    if axis >= tensor.ndim or tensor.shape[axis] != size:
        return tensor
    return fresh(tensor.index_select(axis, torch.arange(other) % size), seed)


def _runs(model: Model, inputs: Inputs) -> bool:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(*(t.clone() for t in inputs))
    except Exception:  # PyTorch refuses these sizes
        return False
    return True


def _dims(inputs: Inputs, axis: int, size: int) -> tuple[dict[int, Any], ...]:
    return tuple({axis: Dim.DYNAMIC} if t.ndim > axis and t.shape[axis] == size else {} for t in inputs)


# ---------------------------------------------------------------- doors


def _exported(model: Model, calls: Sequence[Inputs], axis: int, size: int, replan: str) -> Callable[..., Any] | None:
    first, dims = calls[0], _dims(calls[0], axis, size)
    if _exported_by_torch(model, calls[1], dims) is None:  # of a size of 1, torch.export makes a fixed one
        return None
    options = {"deterministic": True, "replan": replan}
    try:
        net = fp.compile(model, tuple(first), dynamic_shapes={"inputs": dims}, max_shapes=8, **options)
    except FmtpropError as error:
        if any(text in str(error) for text in fuzz.REFUSED) or "another branch" in str(error):
            return None
        raise
    fuzz.CHOSEN.update(["shapes, exported"])

    def run(*inputs: torch.Tensor) -> Any:
        try:
            result = net(*inputs)
        except InputError as error:
            if not any(text in str(error) for text in ("was exported for", "another branch")):
                raise
            return model(*inputs)  # a relation of sizes that the first call decided, recorded as a range or a branch
        if replan != "never":
            net.settle()
            _compare_costs(net, model, inputs)
        return result

    return run


def _compare_costs(net: Any, model: Model, inputs: Sequence[torch.Tensor]) -> None:
    later = net.plan_for(*inputs).certificate
    if later is None or later.objective < _SMALLEST_SECONDS:
        return
    alone = fp.compile(model, tuple(inputs), deterministic=True).certificate
    assert alone is not None
    fuzz.CHOSEN.update(["shapes, costs compared"])
    if later.objective > _MOST_RATIO * alone.objective:
        raise AssertionError(
            f"the plan costs {later.objective:.2e} s, one for this shape alone {alone.objective:.2e} s"
        )


def _exported_by_torch(model: Model, first: Inputs, dims: Any) -> Any:
    try:
        with torch.no_grad():  # calls with parameters as running statistics have no gradient
            return torch.export.export(model, tuple(first), dynamic_shapes={"inputs": dims})
    except Exception:  # a size that the program's calls fix
        return None


def _captured(model: Model, calls: Sequence[Inputs], axis: int, size: int, replan: str) -> Callable[..., Any]:
    fuzz.CHOSEN.update(["shapes, torch.compile"])
    options = {"deterministic": True, "replan": replan}
    run = torch.compile(model, backend="fmtprop", dynamic=True, options=options)

    def without_gradients(*inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return run(*inputs)

    return without_gradients


def _file(model: Model, calls: Sequence[Inputs], axis: int, size: int, replan: str) -> Callable[..., Any] | None:
    written = io.BytesIO()
    first = calls[0]
    program = _exported_by_torch(model, calls[1], _dims(first, axis, size))
    if program is None:
        return None
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            torch.onnx.export(program, (), written, dynamo=True, verbose=False)
    except Exception:  # the exporter lacks an operator
        return None
    try:
        session = fp.onnx.InferenceSession(written.getvalue(), deterministic=True, replan=replan)
    except FmtpropError as error:
        if "operator" in str(error):
            return None
        raise
    fuzz.CHOSEN.update(["shapes, onnx"])
    names = [given.name for given in session.get_inputs()]
    if len(names) != len(first):  # the exporter leaves inputs out, or adds some
        return None

    def run(*inputs: torch.Tensor) -> Any:
        feed = {name: given.numpy() for name, given in zip(names, inputs, strict=True)}
        with torch.no_grad():
            expected = model(*(t.clone() for t in inputs))
        try:
            ours = list(map(_tensor, session.run(None, feed)))
        except InputError:
            if _agrees_with_onnx_runtime(written.getvalue(), feed, None):
                return expected  # the exported file takes no such sizes
            raise
        leaves, form = torch.utils._pytree.tree_flatten(expected)
        is_as_written = fuzz.differ(ours, leaves) and _agrees_with_onnx_runtime(written.getvalue(), feed, ours)
        return expected if is_as_written else torch.utils._pytree.tree_unflatten(ours, form)

    return run


def _tensor(array: Any) -> torch.Tensor:
    is_bf16 = array.dtype == "bfloat16"
    return torch.from_numpy(array.view("i2")).view(torch.bfloat16) if is_bf16 else torch.from_numpy(array)


def _agrees_with_onnx_runtime(model: bytes, feed: dict[str, Any], ours: Sequence[torch.Tensor] | None) -> bool:
    """Say whether ONNX Runtime, where installed, gives these results, or none: a file may mean something else."""
    if find_spec("onnxruntime") is None:
        return False
    import onnxruntime

    try:
        theirs = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feed)
    except Exception:  # its own classes
        return ours is None
    return ours is not None and fuzz.differ(list(ours), list(map(_tensor, theirs))) is None
