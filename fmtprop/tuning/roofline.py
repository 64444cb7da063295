"""Costs by a model: the time for arithmetic or for moving bytes, whichever is longer, plus a call.

Nothing is measured here: :mod:`fmtprop.tuning.peaks` has the machine's rates. Must not know a library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

from fmtprop.ir import Attrs, Linear, Node, PostOp, TensorType, linear_of, opdef
from fmtprop.ir.post_ops import types_along
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.layout.geometry import axis_order
from fmtprop.passes.target import AS_GRADIENT, EXCHANGED, Candidate
from fmtprop.targets.executable import threads_here
from fmtprop.tuning import identity
from fmtprop.tuning.efficiency import (
    AS_CONVOLUTION,
    efficiency,
    filled,
    in_rows,
    in_steps,
    is_by_vectors,
    is_general,
    of_depthwise,
    shape_of,
    uses_tiles,
)
from fmtprop.tuning.peaks import FOOTPRINTS, Peaks

#: operations per element of a post-op after a convolution by a general product, which applies it element by element:
#: 5 ns for a simple function, 20 for a costly one, 45 for one with an operand (v3.2, f32, one core)
_GENERAL_TAIL = {"simple": 500.0, "costly": 2000.0, "operand": 4500.0}

#: the same after the gradient of a convolution that serves as a deconvolution: 38, 65 and 66 ns; 3 ns for a bias
_GRADIENT_TAIL = {"simple": 3800.0, "costly": 6500.0, "operand": 6500.0, "bias": 300.0}

#: operations per number that a convolution by a general product gathers for it: each position's window. 0.5 to 0.8 ns
#: (v3.2, f32, one core)
_GATHERED = 60.0

#: operations per byte of weights that a general product of bytes packs in each run: 0.2 ns where there is one row
#: (v3.2, AVX-512, one core)
_GENERAL_PACKED = 20.0

#: operations per number that the gradient of a convolution adds up by a general product: each position's window, for
#: each channel of the result. 0.9 to 1.7 ns for 1 to 12 channels (v3.2, f32, one core); and the share of the peak at
#: which it makes these numbers
_GENERAL_WINDOW, _GENERAL_GRADIENT = 120.0, 0.8

#: part of its speed that the kernel of blocks reaches as the gradient of a convolution (v3.2)
_GRADIENT_SHARE = 0.75

#: operations per element of a costly function where a kernel of the project's own does it, if its speed is unknown
_KERNEL_OPERATIONS = 6.0

#: share of the peak that other operations than products reach: they are not fused, and few follow each other
_POINTWISE_SHARE = 0.2

#: part of their op's pace that single implementations reach, by name, or by op and name (a concat's `simple` is fast)
_SLOW = {
    "nspc_bnorm:any": 0.03,
    "ncsp_bnorm:any": 0.03,
    "bnorm_tbb_jit:avx2": 0.2,
    "bnorm_tbb_jit:sse41": 0.1,
    "simple_nhwc:any": 0.3,
    "simple_nchw:any": 0.02,
    "layer_normalization simple:any": 0.02,
}

#: the same for types narrower than f32, converted one by one: 12 ns for a number of f32, 31 of bf16
_SLOW_NARROW = {"simple_nchw:any": 0.004, "layer_normalization simple:any": 0.006}

#: the kind of a sum with one channel per group
_DEPTHWISE = 2

#: part of its speed on blocks that `jit_1x1` reaches on channels-last tensors with vectors of 16: the median of 18
#: layers of MNASNet (v3.2, Xeon, two threads); there, brgconv_1x1 is as fast as this one on blocks
_POINTWISE_ACROSS_SHARE = 0.9

#: peak of vectors beside matrices (AMX), in that of f32: fours of bytes 2.0 to 2.9, pairs of bf16, which have half of
#: the units, 0.55 to 0.97 (a Xeon, v3.2)
_VECTORS_BESIDE_TILES = {DataType.U8: 2.8, DataType.S8: 2.8, DataType.BF16: 0.75}

#: bytes of the weights of a direction's state, read for one sequence, for which a step of oneDNN keeps one more thread
#: busy. Two threads are 1.0, 1.0, 1.8 times as fast as one for LSTMs of 64, 128 and 256 states of one sequence, and 1.3
#: and 1.7 times for 128 states of 4 and 8 (AVX-512, v3.2)
_STEP_NBYTES = 400 << 10

#: bytes of these weights that stay in the second cache between steps: half of a large one. LSTMs and GRUs of 384 to
#: 768 states and 1 to 8 sequences cost 0.6 to 1.6 of their runs so, and 0.2 to 0.6 without (a busy Xeon, one thread)
_KEPT_NBYTES = 1 << 20

#: a pair of convolutions that runs as two kernels, and writes and reads the tensor between them
_TWO_KERNELS = "ref_fused_convolution"

#: elements of f32 in a vector of AVX2
_AVX2_LANES = 8

#: time of a sum of products and of a reorder without work, in empty calls
_PRODUCT_CALL, _REORDER_CALL = 3.0, 2.0

#: bytes between rows of a plain matrix of f32 of which `brg` reads rows that compete for the same places of the first
#: cache, and the part of its speed that is left: 200 x 768 x 3072 takes 9.3 ms, 6.3 with the matrix packed first, and
#: 6.0 in MKL (two threads of a Xeon's core, v3.2)
_PAGE_NBYTES, _BY_PAGES_SHARE = 4096, 0.6

#: share of the copying bandwidth that a reorder reaches: a copy (of another type, or between strides), into or out of
#: blocks, a transpose
_REORDER = {"copy": 0.8, "block": 0.75, "transpose": 0.5}

#: a measured time is impossible if its arithmetic, or its bytes, take more than this factor longer at the machine's
#: peak. Not 1: filtering needs a quarter of the products, and a peak may be of a moment when another virtual machine
#: had half of the core
_FASTER_RATIO = 8.0

#: it is impossible, too, if it is above this factor of the modelled time, and above these seconds. A loaded core takes
#: two or three times as long, the model is wrong by up to 8 for small steps; with denormal numbers, it took 30
_SLOWER_RATIO, _ANY_SECONDS = 12.0, 1e-4

#: positions of dst for which `brgconv` copies what lies between the first and the last number of their windows along
#: the last axis. Windows of 3 that are 1000 positions apart double the time of 7500 positions of 128 channels (AVX2,
#: v3.2); on blocks of channels, `jit` copies nothing
_COPIED_BLOCK = 48

#: seconds that an operator of PyTorch takes before it moves a byte
_PYTORCH_CALL_SECONDS = 4e-6

#: share of the copying bandwidth at which PyTorch's costly functions run, and its others as post-ops
_PYTORCH_COSTLY_SHARE, _PYTORCH_TAIL_SHARE = 0.3, 0.7

#: share up to which an operator takes several passes: it computes in f32, so narrower numbers do not make it faster
_PYTORCH_PASSES_SHARE = 0.3

#: share of the peak that the products of its deconvolutions reach (70 random ones, torch 2.13)
_PYTORCH_TRANSPOSED_SHARE = 0.25

#: seconds that a number takes in its element-wise functions of tensors whose axes lie in different orders, one number
#: at a time: f32, and narrower types, which it converts (torch 2.13, products of 150 000 to a million numbers)
_PYTORCH_ACROSS_SECONDS = (0.6e-9, 1.4e-9)

#: operators in a row, where an op has none of its own
_PYTORCH_SEVERAL = 4

#: share of the peak that PyTorch's products reach; those that rearrange their operands first, each time
_PYTORCH_PRODUCTS_SHARE, _PYTORCH_PACKED_SHARE = 0.7, 0.35

#: operations that an element of a window takes, where channels are innermost and where not
_PYTORCH_WINDOW = (12.0, 100.0)


class ModelCosts:
    """Costs by a roofline model.

    `footprint`: bytes of all weights of the network, and of the activations of a step: weights are read once in each
    run, from the cache that holds all of these, or from memory. `lanes`: elements of f32 in the vectors with which the
    machine reaches its peak. `has_tiles`: whether it multiplies matrices of narrow types (AMX).

    The figures rank ways to run one node; between a node and another they are rough. They fit `Costs` of
    :mod:`fmtprop.passes.target`.
    """

    def __init__(self, peaks: Peaks, footprint: int, lanes: int = _AVX2_LANES, *, has_tiles: bool = False) -> None:
        self.peaks, self._lanes, self._has_tiles = peaks, lanes, has_tiles
        self._streaming, self._by_kernel = (1 / peaks.rate(footprint, by_kernel=own) for own in (False, True))
        # numbers of every type are computed on in f32, but for products
        self._vectors = peaks.flops[DataType.F32]
        self._pointwise = self._vectors * _POINTWISE_SHARE
        self._functions = peaks.functions or self._pointwise / _KERNEL_OPERATIONS
        self._cached, self._few_rows_share = 1 / peaks.copying, peaks.rate(0, by_kernel=True) / peaks.rate(0)

    def prepare(
        self, work: Sequence[tuple[Node, Candidate]], reorders: Sequence[tuple[MemoryDesc, MemoryDesc]]
    ) -> None:
        """Do nothing: a model needs no preparation."""

    def node(self, node: Node, candidate: Candidate) -> float:
        """Return the seconds that a node takes when it runs so."""
        if candidate.target == "view" or node.is_boundary:
            return 0.0
        operands, dst = candidate.operands, candidate.results[0]
        impl = candidate.impl.removeprefix(f"{EXCHANGED}:")
        if node.op == "reorder":
            return self._reorder(operands["src"], dst)
        sizes = _sizes_along(node, operands, dst)
        linear, cost = linear_of(node), opdef(node.op).cost
        share, streaming = cost.pace, self._streaming
        if _says(candidate, "moves_freely"):
            share, streaming = (1.0, streaming) if linear is None else (self._few_rows_share, self._by_kernel)
        slow = {**_SLOW, **_SLOW_NARROW} if dst.dtype.nbytes < DataType.F32.nbytes else _SLOW
        pace = slow.get(impl) or slow.get(f"{node.op} {impl}", 1.0)
        moved = self._moving(node, operands, candidate.results, share, streaming) / pace
        if _says(candidate, "by_operators"):
            return self._by_pytorch(node, operands, candidate.results)
        if linear is None:
            gathered = prod(operands.get("src", dst).dims) / max(prod(dst.dims), 1)
            arithmetic = cost.operations(node.attrs, gathered) * prod(dst.padded_dims) / self._pointwise
            arithmetic *= self._gathering(impl, dst, cost.gathers)
            if _says(candidate, "by_kernel") and opdef(node.op).elementwise:
                arithmetic = min(arithmetic, prod(dst.dims) / self._functions)
            if candidate.is_ref:
                arithmetic = max(arithmetic, moved) / efficiency("ref")
        else:
            src, weights, out = _roles(linear, operands, sizes[0])
            shape = shape_of(linear, src, weights)
            dtype = _multiplied(linear, operands)
            peak = self._peak_of(impl, shape, dtype, self._peak(dtype))
            reached = efficiency(impl, shape)
            reached *= filled(impl, self._lanes, linear, src, weights)
            if linear.windowed and shape != 1 and out is sizes[0]:
                reached *= in_rows(impl, out.dims[-1 if impl is candidate.impl else -2])
            if linear.by_steps:
                reached *= _in_steps(candidate, src.dims[1], operands["weights_iter"])
            # the name of a kernel behind it comes last
            lanes = _AVX2_LANES if impl.partition("+")[0].endswith(":avx2") else self._lanes
            reached *= lanes / self._lanes
            if lanes > _AVX2_LANES and _is_pointwise_across(impl, src):
                reached *= _POINTWISE_ACROSS_SHARE
            if impl.startswith("brg") and _is_by_pages(linear, weights):
                reached *= _BY_PAGES_SHARE
            products = _products(linear, src, weights, out)
            if out is sizes[0] and is_by_vectors(impl, linear, src, weights, out):
                # to 1, 3, 8 or 16 channels, all take as long with vectors of 16
                products *= -(-out.dims[1] // lanes) * lanes / out.dims[1]
            if impl.startswith(f"{AS_GRADIENT}jit"):  # it computes whole blocks of weights
                products = 2.0 * linear.products(src.dims, weights.dims, out.dims)
                products *= prod(weights.padded_dims) / prod(weights.dims) / _GRADIENT_SHARE
            elif linear.transposed and is_general(impl):
                reached = _GENERAL_GRADIENT
            arithmetic = products / (peak * reached)
            if linear.by_steps:
                again = _read_in_steps(candidate, src.dims[0], operands["weights_iter"])
                arithmetic += again / self.peaks.rate(FOOTPRINTS[0])
            if impl.startswith("brgconv"):
                arithmetic += _copied_windows(node, src, weights, out) * self._cached
            if impl.startswith(AS_GRADIENT) and "bias" in operands:
                arithmetic += _GRADIENT_TAIL["bias"] * prod(sizes[0].dims) / self._vectors
            if linear.transposed and is_general(impl):
                arithmetic += _GENERAL_WINDOW * _added(linear, src, weights, out) / peak
            elif linear.windowed and is_general(impl) and shape_of(linear, src, weights) != 1:
                gathered = linear.products(src.dims, weights.dims, out.dims) / weights.dims[-src.ndim]
                arithmetic += _GATHERED * gathered / peak
            elif is_general(impl.rpartition("matmul:")[2]) and weights.dtype.nbytes == 1:
                arithmetic += _GENERAL_PACKED * prod(weights.dims) / self._vectors
            if _says(candidate, "moves_freely"):  # a kernel of few rows
                arithmetic = 0.0
            elif impl.startswith("brg") and _is_transposed(linear, weights):
                moved += 2 * weights.nbytes * self._cached
        # a post-op's arithmetic comes after the products, its operands with everything else that moves
        post_ops = node.post_ops if not candidate.is_followed else node.post_ops[:-1]
        for post_op, before, behind in zip(post_ops, sizes, sizes[1:], strict=False):
            if post_op.op == "convolution" and post_op.operand is not None:
                window = prod(operands[post_op.operand].dims[1:])
                depthwise = self._vectors * of_depthwise(impl)
                arithmetic += 2.0 * window * prod(behind.dims) / depthwise
                if impl.startswith(_TWO_KERNELS):
                    moved += 2 * before.nbytes * self._cached
            elif impl.startswith(AS_GRADIENT):
                arithmetic += _GRADIENT_TAIL[_tail_kind(post_op)] * prod(before.dims) / self._vectors
            elif linear is not None and linear.windowed and is_general(impl):
                # a sum is a part of the product
                arithmetic += (
                    (post_op.op != "sum") * _GENERAL_TAIL[_tail_kind(post_op)] * prod(before.dims) / self._vectors
                )
            else:
                tail = _operations(post_op.op, post_op.attrs) / self._pointwise
                if _says(candidate, "by_kernel"):  # alone or behind sums, its instructions are the same
                    tail = min(tail, 1 / self._functions)
                arithmetic += tail * prod(before.dims)
        call = self.peaks.call * (_PRODUCT_CALL if linear is not None else 1.0)
        after = self._kernel(dst) if candidate.is_followed else 0.0
        both = arithmetic + moved if linear is not None and uses_tiles(impl) else max(arithmetic, moved)
        return call + both + after

    def _peak(self, dtype: DataType) -> float:
        """Return the operations per second of products of a type."""
        return self.peaks.flops.get(DataType.U8 if dtype is DataType.S8 else dtype) or self._vectors

    def _peak_of(self, impl: str, shape: int, dtype: DataType, peak: float) -> float:
        """Return the peak for an implementation: where vectors compute, not that of matrices (AMX)."""
        f32 = self._vectors
        if shape == _DEPTHWISE:  # in f32, whatever the types are
            return f32
        if uses_tiles(impl) or impl.startswith("aten::"):
            return peak
        if self._has_tiles and dtype in _VECTORS_BESIDE_TILES:
            return _VECTORS_BESIDE_TILES[dtype] * f32
        return min(peak, f32 * DataType.F32.nbytes / dtype.nbytes)

    def _gathering(self, impl: str, dst: MemoryDesc, gathers: float) -> float:
        """Return the factor of operations by code and format: numbers one by one, or partly used vectors."""
        if gathers == 1.0:
            return 1.0
        loops = 1.0 if impl.startswith("jit") else gathers
        if dst.inner_blocks:
            return loops
        return loops * (
            -(-dst.dims[1] // self._lanes) * self._lanes / dst.dims[1] if _is_channels_last(dst) else gathers
        )

    def _by_pytorch(self, node: Node, operands: Mapping[str, MemoryDesc], results: Sequence[MemoryDesc]) -> float:
        """Return the seconds that PyTorch takes: one operator for the op, one more for each post-op."""
        dst, declaration = results[0], opdef(node.op)
        linear, cost = declaration.linear, declaration.cost
        is_costly = declaration.elementwise and _operations(node.op, node.attrs) > 1
        across = _is_channels_last(dst)
        share = (_PYTORCH_COSTLY_SHARE if is_costly else cost.pytorch) * (cost.across if across else 1.0)
        if share <= _PYTORCH_PASSES_SHARE and dst.dtype.is_floating:
            share *= min(dst.dtype.nbytes / DataType.F32.nbytes, 1.0)
        arithmetic = cost.by_pytorch(node.attrs) * prod(dst.dims) / self._pointwise
        seconds = max(arithmetic, self._moving(node, operands, results, share, self._streaming))
        if linear is not None:
            reached = _PYTORCH_PACKED_SHARE if linear.windowed else _PYTORCH_PRODUCTS_SHARE
            reached = _PYTORCH_TRANSPOSED_SHARE if linear.transposed else reached
            src, weights, out = _roles(linear, operands, dst)
            shape = shape_of(linear, src, weights)
            peak = self._peak(_multiplied(linear, operands))
            seconds += _products(linear, src, weights, out) / (peak * reached * efficiency("", shape) / efficiency(""))
        if declaration.elementwise and any(_lies_across(desc, dst) for desc in operands.values()):
            seconds += _PYTORCH_ACROSS_SECONDS[dst.dtype.nbytes < DataType.F32.nbytes] * prod(dst.dims)
        seconds += _PYTORCH_WINDOW[not across] * cost.window(node.attrs) * prod(dst.dims) / self._pointwise
        pace = 1 / self.peaks.moves(2 * dst.nbytes)
        for post_op in node.post_ops:
            share = _PYTORCH_COSTLY_SHARE if _operations(post_op.op, post_op.attrs) > 1 else _PYTORCH_TAIL_SHARE
            if opdef(post_op.op).cost.pytorch < _PYTORCH_PASSES_SHARE:  # several operators, as a rounding is
                share = opdef(post_op.op).cost.pytorch
            arithmetic = opdef(post_op.op).cost.by_pytorch(post_op.attrs) * prod(dst.dims) / self._pointwise
            seconds += max(arithmetic, 2 * dst.nbytes * pace / share)
        calls = 1 if declaration.pytorch.operator is not None else _PYTORCH_SEVERAL
        # it wakes its threads like any call, and Python's call is extra
        return self.peaks.call + (calls + len(node.post_ops)) * _PYTORCH_CALL_SECONDS + seconds

    def _kernel(self, dst: MemoryDesc) -> float:
        """Return the seconds of a kernel after a primitive: its data are still in a cache."""
        moved = 2 * dst.nbytes
        return self.peaks.call + max(prod(dst.dims) / self._functions, moved / self.peaks.moves(moved))

    def reorder(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return the seconds of a reorder, 0 for none, None for workspaces and where dst repeats elements."""
        if src == dst:
            return 0.0
        return None if dst.has_broadcast or src.is_workspace or dst.is_workspace else self._reorder(src, dst)

    def reorder_kind(self, src: MemoryDesc, dst: MemoryDesc) -> str:
        """Return which reorders this one is like: ``"copy"``, ``"block"`` or ``"transpose"``."""
        return _kind(src, dst)

    def bounds(self, what: Node | MemoryDesc, how: Candidate | MemoryDesc, expected: float) -> tuple[float, float]:
        """Return the least and the most seconds that this machine can need: by its peaks, and by the modelled time."""
        linear = linear_of(what) if isinstance(what, Node) else None
        if isinstance(what, Node) and isinstance(how, Candidate):
            moved = sum(desc.nbytes for desc in how.results)
        else:
            moved = how.nbytes if isinstance(how, MemoryDesc) else 0
        ideal = moved * self._cached
        if linear is not None and isinstance(how, Candidate):
            src, weights, dst = _roles(linear, how.operands, how.results[0])
            products = 2.0 * linear.products(src.dims, weights.dims, dst.dims)
            ideal = max(ideal, products / max(self._peak(one.dtype) for one in (src, weights, dst)))
        return ideal / _FASTER_RATIO, max(_SLOWER_RATIO * expected, _ANY_SECONDS)

    def _reorder(self, src: MemoryDesc, dst: MemoryDesc) -> float:
        nbytes = src.nbytes + dst.nbytes
        pace = max(1 / self.peaks.moves(nbytes), self._cached / _REORDER[_kind(src, dst)])
        return _REORDER_CALL * self.peaks.call + nbytes * pace

    def _moving(
        self,
        node: Node,
        operands: Mapping[str, MemoryDesc],
        results: Sequence[MemoryDesc],
        share: float,
        streaming: float,
    ) -> float:
        """Return the seconds for all bytes: parameters from as far as all weights reach, activations from near."""
        parameters = 0
        activations = written = sum(desc.nbytes for desc in results)
        learned = identity.parameters(node.op, operands)
        picks = opdef(node.op).cost.picks(node.attrs)
        for name, desc in operands.items():
            nbytes = min(desc.nbytes, written) if picks else desc.nbytes
            if name in learned:
                parameters += nbytes
            else:
                activations += nbytes
        return parameters * streaming + activations / self.peaks.moves(activations) / share


def _says(candidate: Candidate, name: str) -> bool:
    """Return an attribute of a candidate's implementation; a bare candidate has none."""
    return bool(getattr(candidate.handle, name, False))


def _in_steps(candidate: Candidate, sequences: int, weights: MemoryDesc) -> float:
    """Return the part of its speed at which a recurrent layer runs. A kernel's threads share its tasks.

    `weights`: those of the state.
    """
    threads, kernel = threads_here(), getattr(candidate.handle, "kernel", None)
    if kernel is None:
        busy = sequences * weights.nbytes / prod(weights.dims[:2]) / _STEP_NBYTES
        return in_steps(sequences) * max(1.0, min(busy, threads)) / threads
    return in_steps(kernel.rows, by_kernel=True) * float(min(1.0, kernel.tasks / threads))


def _read_in_steps(candidate: Candidate, steps: int, weights: MemoryDesc) -> int:
    """Return the bytes of the state's weights that do not stay in the second cache from step to step.

    `weights`: of the state, [layers, directions, …].
    """
    times = getattr(getattr(candidate.handle, "kernel", None), "groups", 1)
    directions = prod(weights.dims[:2])
    return directions * times * (steps - 1) * max(0, weights.nbytes // directions - _KEPT_NBYTES)


def _sizes_along(node: Node, operands: Mapping[str, MemoryDesc], dst: MemoryDesc) -> list[MemoryDesc]:
    """Return the tensor that each post-op changes, then dst: a depthwise convolution with strides makes it smaller."""
    if all(post_op.op != "convolution" for post_op in node.post_ops):
        return [dst] * (len(node.post_ops) + 1)
    before, _ = types_along(node, {name: TensorType(desc.dims, desc.dtype) for name, desc in operands.items()})
    return [*(MemoryDesc(type_.dims, type_.dtype) for type_ in before), dst]


def _roles(
    linear: Linear, operands: Mapping[str, MemoryDesc], result: MemoryDesc
) -> tuple[MemoryDesc, MemoryDesc, MemoryDesc]:
    """Return the tensors in the roles of src, weights and dst; one of the three is the result."""
    src, weights, dst = (operands.get(name, result) for name in linear.roles)
    return src, weights, dst


def _lies_across(desc: MemoryDesc, other: MemoryDesc) -> bool:
    """Return whether the axes of two tensors of one size lie in different orders."""
    if desc.dims != other.dims or desc.kind != "blocked" or other.kind != "blocked":
        return False
    return axis_order(desc.geometry) != axis_order(other.geometry)


def _multiplied(linear: Linear, operands: Mapping[str, MemoryDesc]) -> DataType:
    """Return the type of the numbers that are multiplied: that of the source, not of the sums."""
    return next(operands[name].dtype for name in linear.roles if name in operands)


def _is_channels_last(desc: MemoryDesc) -> bool:
    return desc.ndim > 2 and desc.strides[1] < desc.strides[-1]


def _is_pointwise_across(impl: str, src: MemoryDesc) -> bool:
    """Return whether vectors compute a pointwise convolution by the kernel for blocks, on a channels-last tensor."""
    across = impl.startswith(AS_CONVOLUTION) or (not src.inner_blocks and _is_channels_last(src))
    return across and impl.removeprefix(AS_CONVOLUTION).startswith("jit_1x1") and not uses_tiles(impl)


def _copied_windows(node: Node, src: MemoryDesc, weights: MemoryDesc, dst: MemoryDesc) -> float:
    """Return the bytes, read and written, of the positions that `brgconv` copies between those of dilated windows."""
    apart = getattr(node.attrs, "dilates", (0,))[-1]
    if apart == 0:
        return 0.0
    blocks = prod(dst.dims[2:-1]) * -(-dst.dims[-1] // _COPIED_BLOCK)
    between = min((weights.dims[-1] - 1) * apart, src.dims[-1]) * prod(weights.dims[2 - src.ndim : -1])
    return 2.0 * src.dims[0] * blocks * between * src.dims[1] * src.dtype.nbytes


def _is_transposed(linear: Linear, weights: MemoryDesc) -> bool:
    """Return whether a product's matrix is plain with consecutive columns: `brg` rearranges it in each run."""
    return not linear.windowed and weights.is_plain and weights.ndim > 2 and weights.strides[-1] != 1


def _is_by_pages(linear: Linear, weights: MemoryDesc) -> bool:
    """Return whether the rows of a product's matrix lie so that they compete for places in the first cache."""
    if linear.windowed or not weights.is_plain or weights.dtype is not DataType.F32 or weights.strides[-1] != 1:
        return False
    return weights.strides[-2] * weights.dtype.nbytes % _PAGE_NBYTES == 0


def _tail_kind(post_op: PostOp) -> str:
    """Return the kind of a post-op that is computed element by element."""
    if post_op.operand is not None:
        return "operand"
    return "costly" if _operations(post_op.op, post_op.attrs) > 1 else "simple"


def _operations(op: str, attrs: Attrs) -> float:
    return opdef(op).cost.operations(attrs, 1.0)


def _padded(desc: MemoryDesc) -> tuple[int, ...]:
    """Return the sizes that are computed: those of whole blocks."""
    return desc.padded_dims if desc.kind == "blocked" else desc.dims


def _products(linear: Linear, src: MemoryDesc, weights: MemoryDesc, dst: MemoryDesc) -> float:
    """Return the operations of all products, those on padding of blocks included."""
    return 2.0 * linear.products(_padded(src), weights.dims, _padded(dst))


def _added(linear: Linear, src: MemoryDesc, weights: MemoryDesc, dst: MemoryDesc) -> float:
    """Return the numbers that a transposed op adds up: each position's window, for each channel of dst."""
    channels = linear.channels_per_group(weights.dims, src.ndim) or src.dims[1]
    return linear.products(src.dims, weights.dims, dst.dims) / channels


@lru_cache(maxsize=4096)
def _kind(src: MemoryDesc, dst: MemoryDesc) -> str:
    """Return the kind of a reorder, see `reorder_kind`."""
    if src.kind != "blocked" or dst.kind != "blocked":
        return "block"
    if _order(src) == _order(dst):
        return "copy"
    return "block" if src.inner_blocks or dst.inner_blocks else "transpose"


def _order(desc: MemoryDesc) -> tuple[object, ...]:
    """Return the axes from the outermost inwards, those of size 1 left out, and the blocks."""
    axes = sorted((i for i, size in enumerate(desc.dims) if size > 1), key=lambda i: -desc.strides[i])
    return (*axes, *desc.inner_blocks)
