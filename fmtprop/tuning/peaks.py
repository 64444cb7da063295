"""What this machine can do at most: arithmetic and bandwidth, measured through oneDNN with the current threads.

Owns the measurement and its place in the cache; must not know any model of costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

import torch

from fmtprop import dnnl
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.targets.memory import huge_bytes
from fmtprop.tuning.cache import TuningCache, key_of
from fmtprop.tuning.calls import Argument, TimedCall

#: bytes over which weights are streamed again and again: from a first-level cache to beyond any last-level one
FOOTPRINTS = (2 << 20, 8 << 20, 32 << 20, 128 << 20)

#: bytes of one call's weights in a stream
_CHUNK = 1 << 20

#: types whose arithmetic is worth a figure of its own
_TYPES = (DataType.F32, DataType.BF16)


@dataclass(frozen=True)
class Peaks:
    """Figures of this machine with the current number of threads.

    Parameters
    ----------
    flops : mapping of DataType to float
        Operations per second of the best kernel, by data type; a product and a sum count as two.
    reading : mapping of int to float
        Bytes per second at which weights arrive that are used once in a round of so many bytes.
    copying : float
        Bytes per second, read and written, of an element-wise op on activations that are in cache.
    call : float
        Seconds that a primitive takes which has nothing to do.
    """

    flops: Mapping[DataType, float]
    reading: Mapping[int, float]
    copying: float
    call: float

    @property
    def memory(self) -> float:
        """Bytes per second from beyond the last-level cache."""
        return self.reading[FOOTPRINTS[-1]]

    def rate(self, footprint: int) -> float:
        """Return the bytes per second at which data arrives that is used once in a round of ``footprint`` bytes.

        Examples
        --------
        >>> peaks = Peaks({}, dict.fromkeys(FOOTPRINTS[:-1], 4e10) | {FOOTPRINTS[-1]: 1e10}, 4e10, 1e-6)
        >>> [round(peaks.rate(footprint) / 1e9) for footprint in (1000, 64 << 20, 10**12)]
        [40, 20, 10]
        """
        after = bisect_left(FOOTPRINTS, footprint)
        if after == 0 or after == len(FOOTPRINTS):
            return self.reading[FOOTPRINTS[min(after, len(FOOTPRINTS) - 1)]]
        low, high = FOOTPRINTS[after - 1], FOOTPRINTS[after]
        part = log(footprint / low) / log(high / low)
        return exp((1 - part) * log(self.reading[low]) + part * log(self.reading[high]))


def peaks(cache: TuningCache) -> Peaks:
    """Return this machine's figures: from the cache, else measured (in about half a second) and kept there.

    Parameters
    ----------
    cache : TuningCache
        Extended where something was measured.

    Returns
    -------
    Peaks
    """
    types = [dtype for dtype in _TYPES if dtype is DataType.F32 or dnnl.supports(dtype)]
    names = [*(f"flops {dtype}" for dtype in types), *(f"reading {n}" for n in FOOTPRINTS), "copying", "call"]
    keys = {name: key_of({"peak": name}) for name in names}
    known = {name: value for name, key in keys.items() if (value := cache.get(key)) is not None}
    if len(known) < len(names):
        known = _measure(types)
        cache.add({keys[name]: value for name, value in known.items()})
    return Peaks(
        {dtype: known[f"flops {dtype}"] for dtype in types},
        {footprint: known[f"reading {footprint}"] for footprint in FOOTPRINTS},
        known["copying"],
        known["call"],
    )


def _measure(types: list[DataType]) -> dict[str, float]:
    torch.get_num_threads()  # a thread that is new to torch takes over the number that was set for the process
    memory = huge_bytes(FOOTPRINTS[-1])
    found = {f"flops {dtype}": _flops(dtype, memory.data_ptr()) for dtype in types}
    found |= {f"reading {n}": value for n, value in _reading(memory.data_ptr()).items()}
    found["call"] = call = _copy_seconds(16, memory.data_ptr())
    elements = 1 << 18
    found["copying"] = 8 * elements / max(_copy_seconds(elements, memory.data_ptr()) - call, 1e-9)
    return found


def _flops(dtype: DataType, pointer: int) -> float:
    """Return the operations per second of a convolution that stays in cache, and is short: few get interrupted."""
    size, channels = 14, 128
    src, weights, dst = (
        _native(MemoryDesc.any(dims, dtype))
        for dims in ((1, channels, size, size), (channels, channels, 3, 3), (1, channels, size, size))
    )
    ones = (1, 1)
    best = 0.0
    with dnnl.convolution_forward(
        "forward_inference", "convolution_direct", src, weights, None, dst, ones, (0, 0), ones, ones
    ) as first:
        for pd in first.implementations():
            if pd.is_reference or pd.impl.startswith(("gemm", "simple")):
                continue
            operations = 2.0 * size * size * channels * channels * 9
            best = max(best, operations / _fastest(pd, ("SRC", "WEIGHTS", "DST"), pointer, rounds=30))
    return best


def _reading(pointer: int) -> dict[int, float]:
    """Return the bytes per second of a product of one row with weights that come around after a footprint."""
    size = 512
    src, weights, dst = (_native(MemoryDesc(dims, DataType.F32)) for dims in ((1, size), (size, size), (1, size)))
    found = {}
    with dnnl.inner_product_forward("forward_inference", src, weights, None, dst) as pd:
        number, start = int(dnnl.Arg.WEIGHTS), 1 << 16
        call = _call(pd, ("SRC", "WEIGHTS", "DST"), pointer, start)
        for footprint in FOOTPRINTS:
            offsets = range(start, footprint - _CHUNK + 1, _CHUNK) or range(start, start + 1)
            times: list[float] = []
            # the first round brings the caches into the state of the second
            for _ in range(max(2, -(-16 // len(offsets)))):
                times = []
                for offset in offsets:
                    call.point({number: pointer + offset})
                    times.append(call.seconds())
            found[footprint] = _CHUNK / sorted(times)[len(times) // 4]
        call.close()
    # a larger footprint is never read faster: what says so is noise
    for small, large in pairwise(FOOTPRINTS):
        found[large] = min(found[large], found[small])
    return found


def _copy_seconds(elements: int, pointer: int) -> float:
    desc = _native(MemoryDesc((elements,), DataType.F32))
    with dnnl.eltwise_forward("forward_inference", "eltwise_relu", desc, desc) as pd:
        return _fastest(pd, ("SRC", "DST"), pointer, rounds=20)


def _fastest(pd: dnnl.PrimitiveDesc, names: tuple[str, ...], pointer: int, rounds: int) -> float:
    """Return the seconds of the fastest of several executions: whoever else uses the machine only ever adds to it."""
    call = _call(pd, names, pointer, 4 << 20)
    call.seconds()
    best = min(call.seconds() for _ in range(rounds))
    call.close()
    return best


def _call(pd: dnnl.PrimitiveDesc, names: tuple[str, ...], pointer: int, stride: int) -> TimedCall:
    arguments = []
    for index, name in enumerate(names):
        number = int(dnnl.Arg[name])
        md = pd.arg_md(number)
        if md is not None:
            arguments.append(Argument(number, md, pointer + index * stride))
    return TimedCall(pd, arguments, pointer + len(names) * stride)


def _native(desc: MemoryDesc) -> dnnl.NativeDesc:
    return dnnl.NativeDesc.from_desc(desc)
