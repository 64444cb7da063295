"""Recurrent layers by a kernel of our own: which formats it reads."""

from __future__ import annotations

from collections.abc import Iterator

from fmtprop.ir import Node
from fmtprop.jit import LstmBytesKernel, RecurrentKernel
from fmtprop.jit.recurrent import BLOCK, GATES
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import LstmBytes
from fmtprop.ops.recurrent import Recurrent
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.target import Request
from fmtprop.targets.as_rows import Way, as_asked, is_in_rows


def lstm_of_bytes(node: Node, attrs: LstmBytes, request: Request) -> Iterator[Way]:
    """Yield the kernel: src and dst have rows of numbers that lie side by side, weights have blocks of 16 rows."""
    own = {name: plain(desc) for name, desc in request.items()}
    own["weights"] = MemoryDesc(own["weights"].dims, own["weights"].dtype, tag="AB16a4b")
    formats = {name: as_asked(desc, own[name]) for name, desc in request.items()}
    for name in ("src", "dst"):
        if formats[name] is None and is_in_rows(request[name]) and request[name].strides[-1] == 1:
            formats[name] = request[name]
    found = {name: desc for name, desc in formats.items() if desc is not None}
    if len(found) < len(request):
        return
    times, rows, states = found["dst"].dims
    steps = (desc.strides[:2] for desc in (found["src"], found["dst"]))
    kernel = LstmBytesKernel(times, rows, states, attrs.reverse, *((step, row) for step, row in steps))
    results = ("dst", "dst_h", "dst_c")
    yield kernel, {name: found[name] for name in request if name not in results}, tuple(found[name] for name in results)


def recurrent_layers(node: Node, attrs: Recurrent, request: Request) -> Iterator[Way]:
    """Yield the kernel: src_layer and dst_layer have rows of numbers side by side, weights have blocks of states."""
    kind = node.op.removeprefix("lbr_")
    if kind not in GATES or request["src_layer"].dtype is not DataType.F32:
        return
    own = {name: plain(desc) for name, desc in request.items()}
    for name, order in (("weights_layer", "abEcd"), ("weights_iter", "abEcd"), ("bias", "abDc")):
        desc = own[name]
        own[name] = MemoryDesc(desc.dims, desc.dtype, tag=f"{order}{BLOCK}{order[2].lower()}")
    formats = {name: as_asked(desc, own[name]) for name, desc in request.items()}
    for name in ("src_layer", "dst_layer"):
        if formats[name] is None and is_in_rows(request[name]) and request[name].strides[-1] == 1:
            formats[name] = request[name]
    found = {name: desc for name, desc in formats.items() if desc is not None}
    if len(found) < len(request):
        return
    times, sequences, channels = found["src_layer"].dims
    steps = (desc.strides[:2] for desc in (found["src_layer"], found["dst_layer"]))
    kernel = RecurrentKernel(
        *(kind, times, sequences, channels, found["weights_iter"].dims[-1], attrs.directions),
        *((step, row) for step, row in steps),
    )
    results = [name for name in request if name.startswith("dst_")]
    yield kernel, {name: found[name] for name in request if name not in results}, tuple(found[n] for n in results)
