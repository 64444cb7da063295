"""Recurrent layers by a kernel of our own: which formats it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fmtprop.ir import Node
from fmtprop.jit import LstmBytesKernel, RecurrentKernel, StandaloneKernel
from fmtprop.jit.kernel import isa
from fmtprop.jit.recurrent import GATES, STEPS
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import LstmBytes
from fmtprop.ops.recurrent import Recurrent
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.target import Request
from fmtprop.targets.as_rows import Way, as_asked, is_in_rows
from fmtprop.targets.executable import threads_here


def lstm_of_bytes(node: Node, attrs: LstmBytes, request: Request) -> Iterator[Way]:
    """Yield the kernel: src and dst have rows of numbers that lie side by side, weights have blocks of 16 rows."""
    found = _formats(request, {"weights": "AB16a4b"}, ("src", "dst"))
    if found is not None:
        times, rows, states = found["dst"].dims
        src, dst = _steps(found["src"]), _steps(found["dst"])
        yield _way(LstmBytesKernel(times, rows, states, attrs.reverse, src, dst, attrs.symmetric_weights), found)


def recurrent_layers(node: Node, attrs: Recurrent, request: Request) -> Iterator[Way]:
    """Yield the kernel: src_layer and dst_layer have rows of numbers side by side, weights have blocks of states."""
    kind = node.op.removeprefix("lbr_")
    if kind not in GATES or request["src_layer"].dtype is not DataType.F32:
        return
    weights = f"abEcd{isa().lanes}e"
    blocks = {"weights_layer": weights, "weights_iter": weights, "bias": f"abDc{isa().lanes}d"}
    found = _formats(request, blocks, ("src_layer", "dst_layer"))
    if found is not None:
        times, sequences, channels = found["src_layer"].dims
        groups = max(-(-sequences // STEPS), min(sequences, threads_here() // attrs.directions))
        sizes = (times, sequences, channels, found["weights_iter"].dims[-1], attrs.directions, groups)
        steps = (_steps(found[name]) for name in ("src_layer", "dst_layer"))
        yield _way(RecurrentKernel(kind, *sizes, *steps), found)


def _formats(request: Request, tags: Mapping[str, str], in_rows: Sequence[str]) -> dict[str, MemoryDesc] | None:
    """Return plain formats, but for those that have tags, and rows of a sequence at any distance; None for others."""
    found = {}
    for name, desc in request.items():
        own = MemoryDesc(desc.dims, desc.dtype, tag=tags[name]) if name in tags else plain(desc)
        have = as_asked(desc, own)
        if have is None and name in in_rows and is_in_rows(desc) and desc.strides[-1] == 1:
            have = desc
        if have is None:
            return None
        found[name] = have
    return found


def _steps(desc: MemoryDesc) -> tuple[int, int]:
    """Return the numbers from step to step, and from sequence to sequence."""
    step, row, _ = desc.strides
    return step, row


def _way(kernel: StandaloneKernel, found: Request) -> Way:
    operands = {name: desc for name, desc in found.items() if not name.startswith("dst")}
    return kernel, operands, tuple(desc for name, desc in found.items() if name not in operands)
