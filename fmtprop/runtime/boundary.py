"""The caller's tensors at a plan's boundary: inputs that are read in place, outputs that results are written to.

Owns the rules of fitting tensors and the errors for others; must not know how a plan runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from fmtprop.errors import InputError
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc
from fmtprop.ops.pytorch import (
    PROXY,
    FakeTensor,
    TensorGuards,
    dispatch_mode,
    dispatch_mode_before,
    is_key_included,
    tracing_state,
)
from fmtprop.runtime.plan import Plan
from fmtprop.system.printable import counted

#: kinds of calls, with some inputs made in inference mode, that are checked at once
_MOST_MIXED = 4

#: limit of steps of the exact overlap test; beyond it, tensors count as overlapping
OVERLAP_STEPS = 100_000

# many runs ask these; a search in PyTorch's modules would double the time
_PRE_DISPATCH = torch.DispatchKey.PreDispatch
_STRIDED, _TENSOR = torch.strided, torch.Tensor
_is_inference, _data_ptr, _is_nested = torch.is_inference_mode_enabled, torch.Tensor.data_ptr, attrgetter("is_nested")

#: bytes of an element -> a type of this size that numpy has
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Endpoint:
    """An input or output of a plan, with the properties of a fitting tensor.

    `desc`: the format in which the plan reads or writes the tensor. An output's is plain; an input's may be blocked or
    opaque.
    """

    __slots__ = ("desc", "dims", "dtype", "name", "strides")

    def __init__(self, name: str, desc: MemoryDesc) -> None:
        self.name, self.desc = name, desc
        self.dims, self.dtype = desc.dims, torch_dtype(desc.dtype)
        #: strides of a dense tensor that can be read in place; empty if the format is not plain
        self.strides = desc.strides if desc.is_plain else ()

    def read(self, tensor: object) -> torch.Tensor:
        """Return an input in the format that the plan reads: the tensor itself, or a copy.

        Raises InputError if kind, shape, data type or device does not fit.
        """
        try:
            fits = (
                type(tensor) is _TENSOR  # no subclass
                and tensor.dtype is self.dtype
                and tensor.is_cpu
                and tensor.layout is _STRIDED
                and not tensor.is_nested  # a nested tensor has no shape
                and tensor.shape == self.dims
                and tensor.stride() == self.strides
                and not tensor.requires_grad
                and not tensor.is_neg()
                and (tensor.data_ptr() != 0 or tensor.numel() == 0)
            )
        except RuntimeError:  # a wrapper without memory
            fits = False
        if fits:
            return tensor  # type: ignore[return-value]
        tensor = self._checked("input", tensor).detach()
        if self.holds(tensor):
            return tensor
        from fmtprop.targets.mkldnn.inputs import in_format

        return in_format(tensor, self.desc)

    def check_out(self, tensor: object) -> torch.Tensor:
        """Return the caller's tensor, to which a result may be written."""
        checked = self._checked("out", tensor)
        if checked.requires_grad:
            raise InputError(f"out {self.name} requires grad, which a compiled model cannot give; pass out.detach()")
        if _may_overlap_itself(checked):
            raise InputError(
                f"out {self.name} has strides {checked.stride()} for shape {self.dims}: elements share "
                f"memory; {self._remedy()}"
            )
        return checked

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a fitting tensor has the plan's format in memory."""
        if not self.desc.is_plain or tensor.is_mkldnn:
            return False
        same = all(n == 1 or a == b for n, a, b in zip(self.dims, tensor.stride(), self.strides, strict=True))
        return same and not tensor.is_conj() and not tensor.is_neg()

    def _checked(self, kind: str, tensor: object) -> torch.Tensor:
        name = f"{kind} {self.name}"
        if not isinstance(tensor, torch.Tensor):
            remedy = f"; pass torch.from_numpy({self.name})" if isinstance(tensor, np.ndarray) else ""
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}{remedy}")
        if tensor.device.type != "cpu":
            remedy = f"pass {self.name}.cpu()" if kind == "input" else "pass a tensor on the CPU"
            raise InputError(f"{name} is on {tensor.device}, but plans run on the CPU: {remedy}")
        if tensor.is_nested:  # with strided layout, its shape cannot be queried
            raise InputError(f"{name} is a nested tensor; pass a dense one of shape {self.dims}")
        if tensor.layout is not torch.strided and not (kind == "input" and tensor.is_mkldnn):
            remedy = f" ({self.name}.to_dense())" if kind == "input" else ""
            raise InputError(f"{name} has layout {tensor.layout}; pass a strided tensor{remedy}")
        if tuple(tensor.shape) != self.dims:
            example = "compile again with example inputs of this shape" if kind == "input" else self._remedy()
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)}, but the model was compiled for {self.dims}; {example}"
            )
        if not tensor.is_mkldnn and not _has_memory(tensor):
            raise InputError(
                f"{name} has no memory of its own (a fake tensor, one inside torch.func.vmap or torch.compile, or "
                "one with emptied storage); pass a real tensor, and call the model outside of the transformation"
            )
        if tensor.dtype is not self.dtype:
            remedy = self._remedy()
            if kind == "input":
                remedy = f"pass {self.name}.{'dequantize()' if tensor.is_quantized else f'to({self.dtype})'}"
            raise InputError(
                f"{name} is {tensor.dtype}, but the model was compiled for {self.desc.dtype.value}; {remedy}"
            )
        return tensor

    def _remedy(self) -> str:
        return f"pass torch.empty({self.dims}, dtype={self.dtype})"


class Boundary:
    """All inputs and outputs of a plan, in order."""

    __slots__ = ("_checks", "_mixed", "inputs", "model", "outputs")

    def __init__(self, model: str, inputs: Sequence[Endpoint], outputs: Sequence[Endpoint]) -> None:
        self.model, self.inputs, self.outputs = model, tuple(inputs), tuple(outputs)
        #: checks of all inputs at once, outside of inference mode and in it
        self._checks = _checks(self.inputs, False), _checks(self.inputs, True)
        #: which inputs of calls in that mode were made in it, where some but not all were: a cache and new tokens
        self._mixed: set[tuple[bool, ...]] = set()

    @classmethod
    def of(cls, plan: Plan) -> Boundary:
        """Return the boundary of a plan."""
        inputs = tuple(Endpoint(name, desc) for name, desc, _ in plan.inputs)
        return cls(plan.name, inputs, tuple(Endpoint(name, access.desc) for name, access in plan.outputs))

    def read(self, inputs: Sequence[object]) -> Sequence[torch.Tensor]:
        """Return the inputs as the plan reads them."""
        if len(inputs) == len(self.inputs) and dispatch_mode(PROXY) is None and self._fit_at_once(inputs):
            return inputs  # type: ignore[return-value]
        recorder = _recorder()
        if recorder:
            raise InputError(
                f"model {self.model} cannot be recorded by {recorder}, which sees only PyTorch's operators and would "
                "take its results for uninitialised tensors; record the module that it was compiled from"
            )
        if len(inputs) != len(self.inputs):
            names = ", ".join(one.name for one in self.inputs)
            raise InputError(
                f"model {self.model} takes {counted(len(self.inputs), 'input')} ({names}), got {len(inputs)}"
            )
        read = []
        for one, tensor in zip(self.inputs, inputs, strict=True):
            read.append(one.read(tensor))  # under torch.compile, each frame takes a fifth of a us
        if _is_inference() and self._checks[True] and len(self._mixed) < _MOST_MIXED:
            made = tuple(tensor.is_inference() for tensor in read)
            if made not in self._mixed and len({*made}) > 1:
                self._mixed.add(made)
                self._checks[True].append(_check(self.inputs, made, is_inference=True))
        return read

    def _fit_at_once(self, inputs: Sequence[object]) -> bool:
        """Whether all inputs are plain tensors that can be read in place; False says nothing."""
        try:
            # the checks end the process for a nested tensor; emptied storage has no address
            if not any(map(_is_nested, inputs)):
                for check in self._checks[_is_inference()]:
                    if check(*inputs):
                        return all(map(_data_ptr, inputs))  # type: ignore[arg-type]
        except AttributeError:  # no tensor
            pass
        return False

    def check_out(self, out: object, inputs: Sequence[object]) -> list[torch.Tensor]:
        """Return the tensors to which results are written."""
        given = [out] if isinstance(out, torch.Tensor) else list(out) if isinstance(out, list | tuple) else None
        if given is None:
            raise InputError(f"out must be a tensor or a tuple of tensors, got {type(out).__name__}")
        if len(given) != len(self.outputs):
            names = ", ".join(one.name for one in self.outputs)
            raise InputError(f"model {self.model} returns {len(self.outputs)} tensors ({names}), out has {len(given)}")
        tensors = [one.check_out(tensor) for one, tensor in zip(self.outputs, given, strict=True)]
        named = [(f"out {one.name}", tensor) for one, tensor in zip(self.outputs, tensors, strict=True)]
        read = [(f"input {p.name}", x) for p, x in zip(self.inputs, inputs, strict=True) if isinstance(x, torch.Tensor)]
        for (a, one), (b, other) in [*combinations(named, 2), *((x, y) for x in named for y in read)]:
            if _overlap(one, other):
                raise InputError(f"{a} shares memory with {b}; pass tensors that do not overlap")
        return tensors


def _checks(inputs: Sequence[Endpoint], is_inference: bool) -> list[Callable[..., bool]]:
    """Return functions that say of all inputs at once whether each is such a tensor, and none is another one.

    They take 0.25 us and 0.07 us for each tensor, :meth:`Endpoint.read` 0.7 us for each. PyTorch's compiled code is
    guarded by the same object. It compares the keys by which PyTorch's dispatcher chooses kernels: those of the tensor
    (device, layout, lazy sign, a wrapper, made in inference mode) and of the mode in which the object was made. The
    recorders have keys of their own, so no tensor fits while one records, except ``make_fx`` with its default options.
    """
    if not inputs or not all(one.desc.is_plain for one in inputs) or _recorder():
        return []
    kinds = (False, True)[: 1 + is_inference]
    return [_check(inputs, [made] * len(inputs), is_inference=is_inference) for made in kinds]


def _check(inputs: Sequence[Endpoint], made_in_mode: Sequence[bool], *, is_inference: bool) -> Callable[..., bool]:
    """Return one such function, for tensors of which some were made in inference mode."""
    likes = []
    for one, is_made_in_mode in zip(inputs, made_in_mode, strict=True):
        with torch.inference_mode(is_made_in_mode):
            likes.append(torch.empty(0, dtype=one.dtype, device="cpu"))
    with torch.inference_mode(is_inference):
        sizes: Any = [list(one.dims) for one in inputs]  # PyTorch's stubs know one tensor
        strides: Any = [list(one.strides) for one in inputs]
        check: Callable[..., bool] = TensorGuards(*likes, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def write_out(target: torch.Tensor, result: torch.Tensor) -> None:
    """Write a result to the caller's checked tensor."""
    with torch.inference_mode():  # outside of this mode, PyTorch refuses to write tensors made in it
        target.copy_(result)


def _recorder() -> str:
    """Return the name of the tool that records operators now; empty if none does."""
    if tracing_state() is not None:
        return "torch.jit.trace"
    if dispatch_mode(PROXY) is not None:
        return "make_fx"
    # make_fx(pre_dispatch=True) sets a mode of the process: another thread may be exporting a module
    here = is_key_included(_PRE_DISPATCH)
    before = dispatch_mode_before(PROXY) if here else None
    return "" if before is None else "make_fx"


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has numbers to read; a wrapper or a recording tensor raises, or has no address."""
    return not isinstance(tensor, FakeTensor) and _points_somewhere(tensor)


def _points_somewhere(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    if not one.numel() or not other.numel():
        return False
    (first, end), (start, last) = _extent(one), _extent(other)
    if last <= first or end <= start:
        return False
    # the spans overlap, but the elements may be interleaved, such as two halves of the channels
    try:
        # numpy's stubs allow only two special values of max_work
        return bool(np.shares_memory(_addresses(one), _addresses(other), max_work=OVERLAP_STEPS))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _addresses(tensor: torch.Tensor) -> Any:
    """Return a numpy array over the same elements; their type and a lazy sign do not matter here."""
    bits = torch.empty(0, dtype=_BITS[tensor.element_size()], device="cpu")
    storage = tensor.untyped_storage()
    return bits.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()).numpy()


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements may share a position: no order of the axes nests the strides."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
