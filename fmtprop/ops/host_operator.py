"""Calls of PyTorch's functions on tensors: by their meaning, or with all that can be done before a run done.

Owns the fastest way to write a call's results to given memory: PyTorch's generated bindings, which take half the time
of its overloads, and their parameter ``out``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from fmtprop.errors import FmtpropError, GraphError, UnsupportedOpError
from fmtprop.ir.tensors import torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.ops import host_facts
from fmtprop.ops.building import Copying, Ready, Tensors
from fmtprop.ops.host_call import CallOperand, HostCall, Resolved, arguments_of, in_place_form, is_conversion, prepare
from fmtprop.ops.pytorch import BINDINGS, has_kernel_for
from fmtprop.ops.without_data import result_of

#: a call with an overload for given memory that replaces the memory's strides by the source's
_RESTRIDES = "aten.adaptive_avg_pool2d.default"
#: a call without an overload for given memory that this module writes out
_TABLE_GRADIENT = "aten.embedding_dense_backward.default"
#: the type of a result that is None: a gradient that was not requested
NO_RESULT = TensorType((0,))
#: bytes of a result without readers that a step may keep, so that the call need not make it in each run
_SPARE_NBYTES = 1 << 16

# ---------------------------------------------------------------- by meaning

#: makes a call of a function on its arguments
_Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _made(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def make_call(attrs: HostCall, tensors: Mapping[str, torch.Tensor], run: _Run = _made) -> tuple[torch.Tensor, ...]:
    """Make a call; return complex results as their parts.

    Raises UnsupportedOpError if a result is no tensor, and GraphError if an operand is missing.
    """
    results = _results(attrs, tensors, run)
    return tuple(torch.view_as_real(r.resolve_conj().resolve_neg()) if r.is_complex() else r for r in results)


def _results(attrs: HostCall, tensors: Mapping[str, torch.Tensor], run: _Run = _made) -> tuple[torch.Tensor, ...]:
    prepared = prepare(attrs)
    if prepared.row_major:
        tensors = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    args, kwargs = _filled(attrs.target, prepared, tensors)
    found = run(prepared.function, tuple(args), kwargs)
    every = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    results = tuple(_without_elements() if result is None else result for result in every)
    for index, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise UnsupportedOpError(f"{attrs.target}: result {index} is {result!r}, not a tensor")
    return results


def _without_elements() -> torch.Tensor:
    return torch.empty(NO_RESULT.dims, dtype=torch_dtype(NO_RESULT.dtype), device="cpu")


def _filled(target: str, prepared: Resolved, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with tensors in their places."""

    def filled(value: Any) -> Any:
        if isinstance(value, CallOperand):
            if value.name not in tensors:
                raise GraphError(f"{target} reads operand {value.name}, which is not connected")
            return _joined(tensors[value.name]) if value.is_complex else tensors[value.name]
        return [filled(item) for item in value] if isinstance(value, list) else value

    return [filled(value) for value in prepared.args], {name: filled(v) for name, v in prepared.kwargs.items()}


def _joined(parts: torch.Tensor) -> torch.Tensor:
    """Return the complex tensor that has these parts: a view of them, unless they do not lie in pairs."""
    if not _can_be_joined(parts):
        parts = parts.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(parts)


def _can_be_joined(parts: torch.Tensor) -> bool:
    """Return whether the parts of complex numbers lie in pairs, so that they are complex numbers without a copy."""
    steps = (parts.storage_offset(), *parts.stride()[:-1])
    return parts.stride(-1) == 1 and all(step % 2 == 0 for step in steps)


# ---------------------------------------------------------------- ready to be made


def operator(attrs: HostCall, tensors: Tensors, results: Sequence[torch.Tensor | None]) -> Ready:
    """Return the call, or the one that writes its results to given tensors; None if operands must be copied.

    Arguments are put together once. Complex operands and results are views of their parts. A result that is None has
    no readers.
    """
    prepared = prepare(attrs)
    if attrs.target == _TABLE_GRADIENT and results[0] is not None:
        return _gradient_of_table(attrs, tensors, results[0])
    if prepared.row_major:
        return None
    trial = _tried(attrs, tuple((name, t.dtype, t.shape) for name, t in tensors.items()), len(results))
    if trial is None or len(trial.made) != len(results):
        return None
    joined = {name for value in (*prepared.args, *prepared.kwargs.values()) for name in _complex_operands(value)}
    pairs = [is_complex and r is not None for r, is_complex in zip(results, trial.is_complex, strict=True)]
    parts = [r for r, is_pair in zip(results, pairs, strict=True) if is_pair and r is not None]
    if not all(map(_can_be_joined, (*(tensors[name] for name in joined), *parts))):
        return None
    args, kwargs = _filled(attrs.target, prepared, tensors)
    places = [torch.view_as_complex(r) if p and r is not None else r for r, p in zip(results, pairs, strict=True)]
    if is_conversion(attrs) and places[0] is not None and not joined:  # a copy to given memory does this
        return partial(places[0].copy_, args[0])
    form = in_place_form(prepared.function) if host_facts.changed(attrs) is not None else None
    if form is not None and args[0] is places[0]:
        return partial(form, *args, **kwargs)
    if trial.binding is not None:
        args = _without_numbers(prepared.function, args)
    names = None if attrs.target == _RESTRIDES else _given_names(prepared.function)
    if names is not None and len(names[1]) == len(results):
        given = [_spare(made) if place is None else place for place, made in zip(places, trial.made, strict=True)]
        # running averages of a bf16 batch are f32 by PyTorch's rules for shapes, bf16 by its kernels
        is_sure = len({place.dtype for place in given if place is not None and place.is_floating_point()}) < 2
        if is_sure and not any(place is None for place in given):
            return _writing(trial.binding, *names, args, kwargs, given)
    if any(str(result.real_type) != "Tensor" for result in prepared.function._schema.returns):
        return None
    if form is not None and places[0] is not None:
        dst, src = places[0], args[0]
        return lambda: (dst.copy_(src), form(dst, *args[1:], **kwargs))
    call = partial(trial.binding or prepared.function, *args, **kwargs)
    return Copying(call, places, may_share=_may_share(prepared.function), overload=prepared.function)


@lru_cache(maxsize=1024)
def _may_share(function: Any) -> bool:
    """Return whether a result may be a view of an argument: declared so, by functions called within, or of a user's."""
    is_view = any(result.alias_info is not None for result in function._schema.returns)
    is_composite = has_kernel_for(function.name(), "CompositeImplicitAutograd")
    return is_view or is_composite or function.namespace != "aten"


def _gradient_of_table(
    attrs: HostCall, tensors: Mapping[str, torch.Tensor], dst: torch.Tensor
) -> Callable[[], object] | None:
    """Return a call that adds the gradients of rows to a table. PyTorch's makes another table, which may be large."""
    given = arguments_of(attrs)
    diff, indices = tensors[given["grad_output"].name], tensors[given["indices"].name]
    if given["scale_grad_by_freq"]:
        return None
    padding = given["padding_idx"]

    def add() -> None:
        dst.zero_().index_add_(0, indices.flatten(), diff.reshape(-1, dst.shape[1]))
        if padding >= 0:
            dst[padding].zero_()

    return add


def _complex_operands(value: Any) -> Iterable[str]:
    if isinstance(value, list):
        return [name for item in value for name in _complex_operands(item)]
    return [value.name] if isinstance(value, CallOperand) and value.is_complex else []


# ---------------------------------------------------------------- PyTorch's bindings


class _TrialCall(NamedTuple):
    """Results of a call on tensors without data, None where they are not known; PyTorch's binding for the call."""

    made: tuple[torch.Tensor | None, ...]
    binding: Any

    @property
    def is_complex(self) -> list[bool]:
        """Which results are complex tensors."""
        return [made is not None and made.is_complex() for made in self.made]


@lru_cache(maxsize=1024)
def _tried(attrs: HostCall, operands: tuple[tuple[str, torch.dtype, torch.Size], ...], count: int) -> _TrialCall | None:
    """Make a call on tensors without data; return None if a complex result cannot be excluded."""
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in operands}
    failures = (FmtpropError, RuntimeError, TypeError, ValueError, IndexError)
    try:
        made = _results(attrs, tensors, result_of)
    except failures:
        may_be = any(name in attrs.target for name in ("complex", "fft", "eig", "polar"))
        return None if may_be else _TrialCall((None,) * count, None)
    # without operands, a binding would ask the caller's default device
    binding = binding_of(prepare(attrs).function) if operands else None
    try:
        other = _results(attrs, tensors, partial(result_of, by=binding)) if binding else ()
    except failures:  # it has other parameters
        other = ()
    same = [(one.dtype, one.shape) for one in made] == [(one.dtype, one.shape) for one in other]
    return _TrialCall(made, binding if same else None)


def binding_of(function: Any) -> Any:
    """Return PyTorch's generated binding of the functions of an overload's name; None if they have none."""
    namespace, _, name = function.name().partition("::")
    name = name.partition(".")[0]
    if namespace != "aten":
        return None
    return next(filter(None, (getattr(bindings, name, None) for bindings in BINDINGS)), None)


@lru_cache(maxsize=1024)
def _given_names(function: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Return the overload with the same arguments that writes to tensors, and its names of these.

    None if there is none with kernels that write directly.
    """
    given = [(argument.name, str(argument.real_type)) for argument in function._schema.arguments]
    if ("reduction", "int") in given:
        return None  # some losses resize the given tensor
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        read = [(a.name, str(a.real_type)) for a in other._schema.arguments if not a.is_out]
        # an overload that PyTorch generated from the function computes and then copies
        if read == given and torch.Tag.generated not in other.tags and len(read) < len(other._schema.arguments):
            return other, tuple(a.name for a in other._schema.arguments if a.is_out)
    return None


def _writing(
    binding: Any, overload: Any, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any]
) -> Callable[[], object]:
    if binding is None:
        return partial(overload, *args, **kwargs, **dict(zip(names, given, strict=True)))
    return partial(binding, *args, **kwargs, out=given[0] if len(given) == 1 else tuple(given))


def _spare(made: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor for a result that nothing reads; None if it would be large."""
    if made is None or made.numel() * made.element_size() > _SPARE_NBYTES:
        return None
    return torch.empty(made.shape, dtype=made.dtype, device="cpu")


def _without_numbers(function: Any, args: list[Any]) -> list[Any]:
    """Return the arguments with a tensor instead of a second operand that is a number, for the overload for tensors.

    PyTorch makes this tensor in each call, which takes 1 to 2 us. It has no dimension, so its type does not change the
    result's where the first operand has dimensions and a type of its kind, or of a higher one.
    """
    number = args[1] if len(args) == 2 else None
    if type(number) not in (int, float) or function._schema.arguments[1].name != "other":
        return args
    src = args[0]
    is_kind = src.is_floating_point() or (type(number) is int and src.dtype in _INTEGERS and abs(number) < 1 << 63)
    takes_tensor = str(function._schema.arguments[1].real_type) == "Tensor" or (
        "Tensor" in function.overloadpacket.overloads()  # to look at one by its name may import PyTorch's compiler
    )
    if not is_kind or src.ndim == 0 or not takes_tensor:
        return args
    # a comparison converts a tensor of another type in each call; arithmetic in bf16 reads a number in f32
    wide = torch.float64 if type(number) is float else torch.int64
    dtype = src.dtype if src.dtype in (torch.float32, torch.float64) else wide
    return [src, torch.tensor(number, dtype=dtype, device="cpu")]


_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
