"""A plan checks itself: each distinct primitive runs once on small numbers and is compared with its reference.

Operands are laid out and results read by the project's own numpy algebra, so that the check does not lean on the
library it checks. What passed is remembered on disk by library, instruction set, threads and problem.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import filelock
import numpy as np
import torch

from fmtprop import dnnl
from fmtprop.ir.node import Node
from fmtprop.ir.tensors import tensor_type, torch_dtype
from fmtprop.layout import DataType, MemoryDesc, pack, unpack
from fmtprop.runtime.calls import call_reference
from fmtprop.runtime.plan import Step
from fmtprop.targets.arguments import arguments, start_of
from fmtprop.targets.memory import aligned_bytes
from fmtprop.tuning.directory import cache_directory
from fmtprop.tuning.problem import persistent_text

#: largest error relative to the largest magnitude of the reference
TOLERANCE = {DataType.F32: 2e-5, DataType.BF16: 2e-2, DataType.F16: 4e-3}

#: eltwise algorithms that are defined on positive numbers only
_POSITIVE = frozenset({"log", "sqrt", "pow"})


@dataclass(frozen=True)
class Mismatch:
    """A primitive that gave a wrong answer.

    Parameters
    ----------
    node : Node
        The node whose primitive it is.
    error : float
        Largest error relative to the largest magnitude of the reference.
    repro : str
        benchdnn command line.
    """

    node: Node
    error: float
    repro: str

    def __str__(self) -> str:
        impl = self.node.choice.impl if self.node.choice is not None else "?"
        return f"{self.node.label}: {impl} is off by {self.error:.1e} relative; reproduce with: {self.repro}"


class PassedChecks:
    """The keys of the checks that passed, shared by all processes of a user.

    Parameters
    ----------
    path : Path, optional
        The file; by default one for this library and instruction set in the user's cache directory
        (``FMTPROP_CACHE_DIR`` overrides it).
    """

    def __init__(self, path: Path | None = None) -> None:
        library = dnnl.lib()
        name = f"verified-{library.hash[:12]}-{library.isa}.txt"
        self.path = path or cache_directory() / name
        self._known: set[str] = set()
        try:
            self._known.update(self.path.read_text(encoding="ascii", errors="replace").split())
        except FileNotFoundError:
            pass
        except OSError as error:
            _warn(f"cannot read {self.path} ({error.strerror}); every primitive is checked again")

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def add(self, keys: Iterable[str]) -> None:
        """Remember keys here and on disk; a disk that can't be written costs a warning, nothing else."""
        new = [key for key in keys if key not in self._known]
        if not new:
            return
        self._known.update(new)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{self.path}.lock", timeout=10), self.path.open("a", encoding="ascii") as file:
                file.write("".join(f"{key}\n" for key in new))
        except (OSError, filelock.Timeout) as error:
            _warn(f"cannot write {self.path} ({error}); the checks will be repeated")


def check_steps(steps: Iterable[Step], memory: PassedChecks) -> list[Mismatch]:
    """Check every distinct primitive that is not known to be right.

    Parameters
    ----------
    steps : iterable of Step
        A plan's steps; those of the reference target are passed over.
    memory : PassedChecks
        What passed before; extended.

    Returns
    -------
    list of Mismatch
        The primitives that are wrong.
    """
    passed, wrong, seen = [], [], set()
    for step in steps:
        if step.primitive is None:
            continue
        key = key_of(step)
        if key in memory or key in seen:
            continue
        seen.add(key)
        error = check_step(step)
        if error is None:
            passed.append(key)
        else:
            wrong.append(Mismatch(step.node, error, step.primitive.desc.repro))
    memory.add(passed)
    return wrong


def key_of(step: Step) -> str:
    """Return a hash of everything that the result of a primitive depends on."""
    node, choice = step.node, step.node.choice
    operands = {name: persistent_text(desc) for name, desc in choice.operands.items()} if choice is not None else {}
    problem = {
        "op": node.op,
        "attrs": node.attrs.to_json(),
        "post_ops": [(p.op, p.attrs.to_json(), p.operand) for p in node.post_ops],
        "impl": choice.impl if choice is not None else "",
        "operands": operands,
        "results": [persistent_text(desc) for desc in node.descs],
        "threads": dnnl.lib().threads,
    }
    return hashlib.sha256(json.dumps(problem, sort_keys=True).encode()).hexdigest()


def check_step(step: Step) -> float | None:
    """Run one primitive on small numbers; return its relative error where it is too large, else None."""
    node = step.node
    operands = _read(step)
    tensors = {name: _numbers(node, name, desc) for name, desc in operands.items()}
    (expected, *_) = call_reference(node, tensors)
    got = _execute(step, tensors)
    return _error(got, expected, node.descs[0].dtype)


def _read(step: Step) -> Mapping[str, MemoryDesc]:
    """Return the formats in which the operands are read, wherever in the plan's buffers they lie."""
    return step.node.choice.operands if step.node.choice is not None else {}


def _numbers(node: Node, name: str, desc: MemoryDesc) -> torch.Tensor:
    """Return quarters between -2 and 2, seeded by the operand: their sums are exact in f32 at these sizes."""
    algorithms = {getattr(p.attrs, "alg", "") for p in node.post_ops} | {getattr(node.attrs, "alg", "")}
    positive = name == "variance" or (node.op == "eltwise" and algorithms & _POSITIVE) or "div" in algorithms
    single = desc.dims
    if desc.has_broadcast:  # along such an axis all elements lie in one place: they are one number
        single = tuple(1 if stride == 0 else size for size, stride in zip(desc.dims, desc.strides, strict=True))
    pool = _pool(1 if positive else -8, 9, desc.dtype)
    start = zlib.crc32(f"{node.op}/{name}/{desc.dims}".encode()) % pool.numel()
    count = math.prod(single)
    rounds = -(-(start + count) // pool.numel())
    return pool.repeat(rounds)[start : start + count].reshape(single).expand(desc.dims)


@cache
def _pool(low: int, high: int, dtype: DataType) -> torch.Tensor:
    """Return random quarters, or integers, to take numbers from: a prime number, so that no axis repeats with them."""
    seeded = torch.Generator().manual_seed(0)
    numbers = torch.randint(low, high, (65537,), generator=seeded, dtype=torch.int8).to(torch_dtype(dtype))
    return numbers.div_(4) if dtype.is_floating else numbers


def _execute(step: Step, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    engine, pd = dnnl.Engine.cpu(), step.primitive.desc
    operands = _read(step)
    natives = {name: md for name, _, md in arguments(step.node, pd)}
    flat = {
        name: _packed(tensors[name], desc)
        if desc.kind == "blocked"
        else _packed_by_library(tensors[name], natives[name])
        for name, desc in operands.items()
    }
    result = step.node.descs[0]
    flat["dst"] = aligned_bytes(result.nbytes).fill_(0x55)
    for post_op in step.node.post_ops:
        if post_op.op == "sum" and post_op.operand is not None:
            flat["dst"] = flat[post_op.operand]
    descs = {**operands, "dst": result}
    memories = {
        arg: dnnl.Memory(engine, md, flat[name].data_ptr() + start_of(descs[name], md))
        for name, arg, md in arguments(step.node, pd)
    }
    if pd.scratchpad_nbytes and (md := pd.query_md("scratchpad")) is not None:
        flat["scratchpad"] = aligned_bytes(pd.scratchpad_nbytes).zero_()
        memories[dnnl.Arg.SCRATCHPAD] = dnnl.Memory(engine, md, flat["scratchpad"].data_ptr())
    step.primitive.execute(dnnl.Stream(engine), memories)
    return _unpacked(flat["dst"], result)


def _packed(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    bits = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    flat = aligned_bytes(desc.nbytes).zero_()
    pack(bits, desc, flat.numpy())
    return flat


def _packed_by_library(tensor: torch.Tensor, md: dnnl.NativeDesc) -> torch.Tensor:
    """Lay numbers out in a format that only the library knows."""
    plain = MemoryDesc(tensor.shape, tensor_type(tensor).dtype)
    source, result = _packed(tensor, plain), aligned_bytes(md.nbytes).zero_()
    engine, native = dnnl.Engine.cpu(), dnnl.NativeDesc.from_desc(plain)
    memories: dict[int | dnnl.Arg, dnnl.Memory] = {
        dnnl.Arg.FROM: dnnl.Memory(engine, native, source.data_ptr()),
        dnnl.Arg.TO: dnnl.Memory(engine, md, result.data_ptr()),
    }
    dnnl.Primitive(dnnl.reorder(native, md)).execute(dnnl.Stream(engine), memories)
    return result


def _unpacked(flat: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    array = unpack(flat.numpy().view(desc.dtype.numpy_dtype), desc)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if desc.dtype is DataType.BF16 else tensor


def _error(got: torch.Tensor, expected: torch.Tensor, dtype: DataType) -> float | None:
    if not expected.numel():
        return None
    # bf16 has too few digits for differences, integers may wrap around
    wide = torch.float32 if dtype.is_floating else torch.float64
    got, expected = got.to(wide), expected.to(wide)
    scale, worst = _largest(expected), _largest(got - expected)
    if not math.isfinite(scale):
        # NaN differs by design between oneDNN and PyTorch in a few functions; only numbers are compared
        finite = torch.isfinite(expected)
        if not finite.any():
            return None
        scale, worst = _largest(expected[finite]), _largest(got[finite] - expected[finite])
    if math.isnan(worst):
        worst = math.inf
    relative = worst / scale if scale else worst
    return relative if relative > TOLERANCE.get(dtype, 0.0) else None


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude; NaN if there is one."""
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item()) if not torch.isnan(low) else math.nan


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)
