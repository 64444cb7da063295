"""Peaks of this machine: arithmetic and bandwidth, measured through oneDNN with the current number of threads.

Owns the measurement and its records in the cache; must not know any model of costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from math import exp, log
from statistics import median
from time import perf_counter, sleep

import torch

from fmtprop import dnnl
from fmtprop.jit import GemvKernel, Work, kernel_for, offered
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.building import native
from fmtprop.store import Store, key_of
from fmtprop.system.waiting import Waiting
from fmtprop.targets.bound import Bound, MovableMemory, OwnStream
from fmtprop.targets.executable import threads_here
from fmtprop.targets.memory import huge_bytes
from fmtprop.targets.primitive import bind_primitive

#: bytes of the buffers from which weights are streamed repeatedly: smaller and larger than a usual last-level cache
#: (up to the size of a network's weights; its first compilation needs this memory for a moment). A cache of 32 MiB
#: keeps a part of 64
FOOTPRINTS = (8 << 20, 24 << 20, 64 << 20, 128 << 20)

#: bytes that an element-wise op reads and writes, in the second or last cache on most machines; and more than that
_COPIED_NBYTES, MOVED = 2 << 20, (8 << 20, 32 << 20)

#: bytes of memory for measuring the other figures
_LEAST_NBYTES = MOVED[-1]

#: seconds of uninterrupted work whose median counts: a shorter burst runs at a higher frequency, or while the other
#: virtual CPU of a core rests (two threads on one such core: 279 GFLOP/s for moments, 157 in a run); and the same right
#: after such work
_LASTING_SECONDS, _FOLLOWING_SECONDS = 0.03, 0.01

#: executions during which a thread waited for a processor do not count, unless there are no others for so long
_DISTURBED_SECONDS = 0.5

#: numbers of a row of one call's weights in a stream, their bytes, and bytes before them
_SIDE, _CHUNK_NBYTES, _START = 1 << 10, 4 << 20, 1 << 16

#: bytes from one argument of a call in cache to the next
_STRIDE = 4 << 20

#: least attempts to measure everything, seconds between them (a neighbour's moment ends in between), and seconds after
#: which there is no further attempt
_ATTEMPTS, _PAUSE_SECONDS, _PATIENCE_SECONDS = 3, 0.05, 0.6

#: factor below which two figures are the same: another attempt must come so close to the best one, and by more must a
#: figure get better for a plan to be chosen anew. A footprint as large as a shared last-level cache is read at 30 to 73
#: GB/s on an idle machine, by the pages that the system gives
_SAME_RATIO = 1.5

#: start of a figure's name -> the least value on any machine with AVX2 or later. A smaller value was measured while
#: others used the machine and threads waited for each other
_LEAST = {"reading": 1e9, "streaming": 1e9, "copying": 2e9, "moving": 5e8, "functions": 1e8}
SLOWEST_CALL_SECONDS = 1e-4

#: the same for arithmetic: cycles a second, with a multiplication and an addition in each lane of one thread's vectors
#: (further threads may add nothing: a virtual CPU is not always a core)
_LEAST_CYCLES_PER_SECOND = 1e9

#: figures of no machine but between those of many: cycles a second; bytes that a thread reads from caches and from
#: memory a second, and threads that all of it serves; how much faster a kernel of few rows reads; seconds of a call
_NOMINAL_CYCLES_PER_SECOND, _NOMINAL_NEAR, _NOMINAL_FAR = 3e9, 2e10, 1e10
_NOMINAL_READERS, _NOMINAL_STREAMING, _NOMINAL_CALL_SECONDS = 8, 1.4, 1e-6

#: data types with a separate figure of arithmetic
_TYPES = (DataType.F32, DataType.BF16, DataType.F16, DataType.U8)


#: figures that are measured with the first footprint
_ONCE = frozenset({"copying", "call", "functions", *(f"moving {n}" for n in MOVED)})


@dataclass(frozen=True)
class Peaks:
    """Peaks of this machine with the current number of threads."""

    #: operations per second of the best kernel, by data type (u8 for products of bytes); a multiplication and an
    #: addition count as two. What other types than f32 reach is measured when it is first asked for
    flops: Mapping[DataType, float]
    #: footprint in bytes -> bytes per second of reading weights that are used once per round over the footprint; for
    #: one or more of :data:`FOOTPRINTS`, in ascending order
    reading: Mapping[int, float]
    #: bytes per second, read and written, of an element-wise op on activations in cache
    copying: float
    #: seconds of a primitive without work
    call: float
    #: the same as `reading` for the project's own kernel of few rows; without any, what `reading` has
    streaming: Mapping[int, float] = field(default_factory=dict)
    #: bytes -> the same as `copying` for so many, read and written: of :data:`MOVED`, in ascending order; without any,
    #: the last ones come from memory
    moving: Mapping[int, float] = field(default_factory=dict)
    #: numbers per second of which the project's own kernels compute a costly function in cache; 0 if it is unknown
    functions: float = 0.0

    @property
    def memory(self) -> float:
        """Bytes per second of the largest measured footprint: main memory, if it was requested."""
        return self.reading[max(self.reading)]

    def rate(self, footprint: int, *, by_kernel: bool = False) -> float:
        """Return the bytes per second of reading data that is used once per round over ``footprint`` bytes.

        `by_kernel`: in a product of few rows by a kernel of the project's own.

        >>> peaks = Peaks({}, {8 << 20: 4e10, 24 << 20: 4e10, 64 << 20: 1e10}, 4e10, 1e-6)
        >>> [round(peaks.rate(footprint) / 1e9) for footprint in (1000, 40 << 20, 10**12)]
        [40, 19, 10]
        """
        return _between(self.streaming if by_kernel and self.streaming else self.reading, footprint)

    def moves(self, nbytes: int) -> float:
        """Return the bytes per second of an element-wise op that reads and writes ``nbytes``."""
        far = self.moving or {MOVED[0]: self.copying, MOVED[-1]: min(self.memory, self.copying)}
        return _between({_COPIED_NBYTES: self.copying, **far}, nbytes)


def _between(known: Mapping[int, float], size: int) -> float:
    """Return the figure of a size, by those of the sizes below and above."""
    sizes = sorted(known)
    after = bisect_left(sizes, size)
    if after in (0, len(sizes)):
        return known[sizes[min(after, len(sizes) - 1)]]
    low, high = sizes[after - 1], sizes[after]
    part = log(size / low) / log(high / low)
    return exp((1 - part) * log(known[low]) + part * log(known[high]))


def peaks(store: Store, footprint: int = FOOTPRINTS[-1]) -> Peaks:
    """Return this machine's peaks: from the cache, else measured (in about half a second) and recorded there.

    `footprint`: largest footprint in bytes to measure; measuring takes as much memory.
    """
    asked = FOOTPRINTS[: bisect_left(FOOTPRINTS, footprint) + 1]
    known = _figures(store, DataType.F32, asked)
    # a larger footprint is never read faster: a higher figure is noise
    reading, streaming = (_falling({n: known.get(f"{kind} {n}") for n in FOOTPRINTS}) for kind in _BY_FOOTPRINT)
    moving = _falling({0: known["copying"]} | {n: known[f"moving {n}"] for n in MOVED})
    flops = _Arithmetic(store, known[f"flops {DataType.F32}"])
    # where memory is what limits both, either figure is that of both
    streaming = {n: max(rate, reading[n]) for n, rate in streaming.items()}
    return Peaks(flops, reading, moving.pop(0), known["call"], streaming, moving, known["functions"])


def _figures(store: Store, dtype: DataType, footprints: tuple[int, ...]) -> dict[str, float]:
    """Return all figures that are known, after those of a data type and of some footprints were measured.

    Without footprints, only arithmetic is.
    """
    keys, wanted = keys_of_peaks(), {f"flops {dtype}"}
    if footprints:
        wanted |= _ONCE | {f"{kind} {n}" for kind in _BY_FOOTPRINT for n in footprints}
    known = {name: value for name, key in keys.items() if (value := store.figure(key)) is not None}
    if wanted <= known.keys():
        return known
    types = [dtype] if f"flops {dtype}" not in known else []
    if known.keys() >= _ONCE:
        footprints = tuple(n for n in footprints if any(f"{kind} {n}" not in known for kind in _BY_FOOTPRINT))
    measured = {name: value for name, value in measure(types, footprints).items() if name not in known}
    plausible = {name: _plausible(name, value) for name, value in measured.items()}
    if plausible == measured:  # otherwise the next compilation tries again
        store.add_figures({keys[name]: value for name, value in measured.items()})
    return known | plausible


class _Arithmetic(Mapping[DataType, float]):
    """Operations per second of the types that this machine has: of f32, and of others when they are first asked for."""

    def __init__(self, store: Store, f32: float) -> None:
        self._store, self._known = store, {DataType.F32: f32}

    def __getitem__(self, dtype: DataType) -> float:
        if dtype not in self._known:
            if dtype not in _types():
                raise KeyError(dtype)
            self._known[dtype] = _figures(self._store, dtype, ())[f"flops {dtype}"]
        return self._known[dtype]

    def __iter__(self) -> Iterator[DataType]:
        return iter(_types())

    def __len__(self) -> int:
        return len(_types())


def _falling(figures: Mapping[int, float | None]) -> dict[int, float]:
    """Return the figures that are known, each at most the one before."""
    known = {size: figure for size, figure in figures.items() if figure is not None}
    return dict(zip(known, accumulate(known.values(), min), strict=True))


def are_measured(store: Store) -> bool:
    """Return whether a store has this machine's peaks, but for larger footprints and for other types than f32."""
    names = [*_ONCE, f"flops {DataType.F32}", *(f"{kind} {FOOTPRINTS[0]}" for kind in _BY_FOOTPRINT)]
    return all(store.figure(key_of({"peak": name})) is not None for name in names)


def nominal_peaks() -> Peaks:
    """Return figures that follow from instruction set and threads alone: the same in every process."""
    library = dnnl.lib()
    flops = 4.0 * library.lanes * _NOMINAL_CYCLES_PER_SECOND * library.threads
    found = dict.fromkeys(_types(), flops)
    has_tiles, has_vnni = library.has_tiles, any(map(library.includes, ("avx512_core_vnni", "avx2_vnni")))
    if DataType.BF16 in found:  # pairs of products, or tiles of them
        found[DataType.BF16] = flops * (8 if has_tiles else 2)
    if DataType.U8 in found:  # tiles, fours of products, or pairs in 16 bits
        found[DataType.U8] = flops * (16 if has_tiles else 4 if has_vnni else 2)
    near, far = (speed * min(library.threads, _NOMINAL_READERS) for speed in (_NOMINAL_NEAR, _NOMINAL_FAR))
    reading = {FOOTPRINTS[0]: near, FOOTPRINTS[1]: near, FOOTPRINTS[2]: far}
    streaming = {footprint: rate * _NOMINAL_STREAMING for footprint, rate in reading.items()}
    return Peaks(found, reading, near, _NOMINAL_CALL_SECONDS * (1 if library.threads == 1 else 2), streaming)


def improve(store: Store) -> bool:
    """Measure once more, since a run was much faster than these figures promised; the better figures are recorded."""
    keys = keys_of_peaks()
    known = {name: value for name, key in keys.items() if (value := store.figure(key)) is not None}
    footprints = tuple(n for n in FOOTPRINTS if f"reading {n}" in known)
    if not footprints:
        return False
    found = measure([dtype for dtype in _types() if f"flops {dtype}" in known], footprints)
    better = {name: _best_first(name, [known, found])[0] for name in known.keys() & found.keys()}
    store.add_figures({keys[name]: value for name, value in better.items()})
    return any(not 1 / _SAME_RATIO <= value / known[name] <= _SAME_RATIO for name, value in better.items())


def _types() -> list[DataType]:
    return [dtype for dtype in _TYPES if dtype is DataType.F32 or dnnl.supports(dtype)]


def keys_of_peaks() -> dict[str, str]:
    """Return the key of each figure in a store, by its name; also of types that this machine lacks."""
    names = [*(f"flops {dtype}" for dtype in _TYPES), "copying", "call", "functions", *(f"moving {n}" for n in MOVED)]
    names += [f"{kind} {n}" for kind in _BY_FOOTPRINT for n in FOOTPRINTS]
    return {name: key_of({"peak": name}) for name in names}


def measure(
    types: list[DataType],
    footprints: tuple[int, ...],
    attempt: Callable[[list[DataType], tuple[int, ...], torch.Tensor], dict[str, float]] | None = None,
    now: Callable[[], float] = perf_counter,
    pause: Callable[[float], None] = sleep,
) -> dict[str, float]:
    """Return the figures that two of several attempts reached: other users of the machine make single ones worse.

    Attempts are apart in time, and go on until a second one has come to each best figure.
    """
    torch.get_num_threads()  # the first call in a thread adopts the process's number of threads
    memory = huge_bytes(max((*footprints, _LEAST_NBYTES)))
    attempt, start = attempt or _attempt, now()
    attempts = [attempt(types, footprints, memory)]
    while not _is_sure(attempts) and now() - start <= _PATIENCE_SECONDS:
        pause(_PAUSE_SECONDS)
        attempts.append(attempt(types, footprints, memory))
    return {name: _best_first(name, attempts)[:2][-1] for name in attempts[0]}


def _is_sure(attempts: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the best figures were seen twice."""
    if len(attempts) < _ATTEMPTS:
        return False
    ordered = [_best_first(name, attempts) for name in attempts[0]]
    return all(max(best / second, second / best) <= _SAME_RATIO for best, second, *_ in ordered)


def _best_first(name: str, attempts: Sequence[Mapping[str, float]]) -> list[float]:
    return sorted((found[name] for found in attempts), reverse=name != "call")


def _plausible(name: str, figure: float) -> float:
    """Return a figure, or the worst plausible one."""
    if name == "call":
        return min(figure, SLOWEST_CALL_SECONDS)
    kind = name.partition(" ")[0]
    return max(figure, 2 * dnnl.lib().lanes * _LEAST_CYCLES_PER_SECOND if kind == "flops" else _LEAST[kind])


def _attempt(types: list[DataType], footprints: tuple[int, ...], memory: torch.Tensor) -> dict[str, float]:
    found = {f"flops {dtype}": _flops(dtype, memory) for dtype in types}
    if not footprints:
        return found
    for kind, make in _BY_FOOTPRINT.items():
        found |= {f"{kind} {n}": value for n, value in _reading(footprints, memory, make).items()}
    found["call"] = call = _copy_seconds(16, memory)
    found["functions"] = _functions(memory)
    for name, nbytes in {"copying": _COPIED_NBYTES, **{f"moving {n}": n for n in MOVED}}.items():
        whole = _copy_seconds(nbytes // 8, memory)
        found[name] = nbytes / max(whole - call, whole / 2)  # a call cannot take most of the time
    return found


def _flops(dtype: DataType, memory: torch.Tensor) -> float:
    """Return the operations per second of a convolution in cache; it is short, so few runs are interrupted."""
    size, channels = 14, 128
    weighted = DataType.S8 if dtype is DataType.U8 else dtype
    src, weights, dst = (
        native(MemoryDesc.any(dims, kind))
        for dims, kind in (
            ((1, channels, size, size), dtype),
            ((channels, channels, 3, 3), weighted),
            ((1, channels, size, size), dtype),
        )
    )
    ones = (1, 1)
    best, seconds = 0.0, _LASTING_SECONDS
    problem = dnnl.Convolution(src=src, weights=weights, dst=dst, strides=ones, dilates=(0, 0), pad_l=ones, pad_r=ones)
    with dnnl.create(problem) as first:
        # the library's first or second implementation is its best
        for pd in islice(first.implementations(), 2):
            operations = 2.0 * size * size * channels * channels * 9
            call = _Timed.primitive(pd, ("src", "weights", "dst"), memory, _STRIDE)
            best, seconds = max(best, operations / _lasting(call, seconds)), _FOLLOWING_SECONDS
    return best


def _reading(
    footprints: tuple[int, ...], memory: torch.Tensor, make: Callable[[torch.Tensor], _Timed]
) -> dict[int, float]:
    """Return, for each footprint, the bytes per second of products of one row with weights that cycle through it."""
    found, call = {}, make(memory)
    for footprint in footprints:
        offsets = range(_START, footprint - _CHUNK_NBYTES + 1, _CHUNK_NBYTES) or range(_START, _START + 1)
        times: list[float] = []
        # the first round prepares the caches for the second
        for _ in range(max(2, -(-12 // len(offsets)))):
            times = []
            for offset in offsets:
                call.memories["weights"].put(memory[offset:])
                times.append(call.seconds())
        found[footprint] = _CHUNK_NBYTES / sorted(times)[len(times) // 4]
    call.close()
    return found


def _product(memory: torch.Tensor) -> _Timed:
    """Return the library's product of one row."""
    src, weights, dst = (native(MemoryDesc(dims, DataType.F32)) for dims in ((1, _SIDE), (_SIDE, _SIDE), (1, _SIDE)))
    with dnnl.create(dnnl.InnerProduct(src=src, weights=weights, dst=dst)) as pd:
        return _Timed.primitive(pd, ("src", "weights", "dst"), memory, _START)


def _own_product(memory: torch.Tensor) -> _Timed:
    """Return the project's own product of one row; the library's if this machine has none."""
    kernel = offered(GemvKernel(_SIDE, _SIDE, DataType.F32, DataType.F32))
    if kernel is None:
        return _product(memory)
    work, memories = kernel.work(threads_here()), {}
    for index, name in enumerate(("src", "weights", "dst")):
        memories[name] = MovableMemory()
        memories[name].follow(work.point[name], 0)
        memories[name].put(memory[index * _START :])
    return _Timed(Bound(work.calls, keep=[work]), memories, OwnStream())


def _functions(memory: torch.Tensor) -> float:
    """Return the numbers per second of the project's own SiLU in cache; of the library's if it has none here."""
    numbers = 1 << 16
    kernel = kernel_for("swish", 1.0, 0.0, DataType.F32)
    if kernel is None:
        return numbers / _copy_seconds(numbers, memory, "eltwise_swish")
    work = Work(kernel, 4 * numbers)
    work.set_data_handle(memory.data_ptr())
    return numbers / _lasting(_Timed(Bound([work.call], keep=[work]), {}, OwnStream()))


def _copy_seconds(elements: int, memory: torch.Tensor, alg: str = "eltwise_relu") -> float:
    desc = native(MemoryDesc((elements,), DataType.F32))
    with dnnl.create(dnnl.Eltwise(src=desc, dst=desc, alg=alg, alpha=float(alg != "eltwise_relu"))) as pd:
        return _lasting(_Timed.primitive(pd, ("src", "dst"), memory, max(_STRIDE, 4 * elements)), most_rounds=20)


def _lasting(call: _Timed, lasting: float = _FOLLOWING_SECONDS, most_rounds: int = 1 << 20) -> float:
    """Return the median seconds of executions that follow each other for a while, as in a run; release the call."""
    call.seconds()
    start = perf_counter()
    times: list[float] = []
    with Waiting() as waiting:
        while not times or (len(times) < most_rounds and perf_counter() - start < lasting):
            waiting.lap()
            seconds = call.seconds()
            if waiting.lap() == 0.0 or perf_counter() - start > _DISTURBED_SECONDS:
                times.append(seconds)
    call.close()
    return median(times)


@dataclass(frozen=True)
class _Timed:
    """A call for repeated execution, with its operands in a block of memory."""

    bound: Bound
    memories: Mapping[str, MovableMemory]
    stream: OwnStream
    primitives: tuple[dnnl.Primitive, ...] = ()

    @classmethod
    def primitive(cls, pd: dnnl.PrimitiveDesc, names: tuple[str, ...], memory: torch.Tensor, stride: int) -> _Timed:
        """Return a primitive with its arguments one after another; the primitive descriptor stays the caller's."""
        primitive, stream = dnnl.Primitive(pd), OwnStream()
        memories = {name: MovableMemory() for name in names}
        places = {name: int(dnnl.Arg[name.upper()]) for name in names}
        found = {name: pd.arg_md(place) for name, place in places.items()}
        arguments = [(places[n], md, memories[n], 0) for n, md in found.items() if md is not None]
        scratchpad = MovableMemory(memory[len(names) * stride :])
        bound = bind_primitive(primitive, arguments, scratchpad, stream)
        for index, name in enumerate(names):
            memories[name].put(memory[index * stride :])
        return cls(bound, memories, stream, (primitive,))

    def seconds(self) -> float:
        """Execute once and return the seconds."""
        return self.bound.seconds(self.stream)

    def close(self) -> None:
        """Release the native objects."""
        self.bound.close()
        for primitive in self.primitives:
            primitive.close()
        self.stream.close()


#: kinds of figures by footprint, and what reads
_BY_FOOTPRINT: Mapping[str, Callable[[torch.Tensor], _Timed]] = {"reading": _product, "streaming": _own_product}
