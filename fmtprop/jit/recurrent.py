"""Kernel of a layer of an LSTM or a GRU of few sequences: all steps of a sequence and direction, in one call.

For one sequence, oneDNN calls its products and functions anew in every step, with one row each time: it takes 1.2 to 2
times as long (64 steps of 100 to 256 states, AVX2). Here, a step reads each weight once, in the order of memory.
The products of the input do not wait for the state: six steps of them share a load of weights.

Vectors are those of AVX2 on every machine: a step takes as long as its weights take from the second cache.
"""

from __future__ import annotations

from ctypes import addressof, c_byte, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import ClassVar, Final

from fmtprop.jit.arguments import UNROLLED, Arguments
from fmtprop.jit.isa import AVX2
from fmtprop.jit.kernel import Kernel, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled

#: gates of weights, by the kind of layer; a block of sums has four in both: a GRU's last one is the state's part of the
#: new gate
GATES: Final = {"lstm": 4, "gru": 3}
SUMS: Final = 4

#: states of a block
BLOCK: Final = AVX2.lanes

#: steps whose products of the input are computed together: their sums of two gates are twelve registers
STEPS: Final = 6

#: most bytes of the weights of the state, read once for each sequence: what the second and the third cache give in
#: time, for one or two sequences and for more. oneDNN, which reads them for several sequences at once, takes 1.1 to 2.6
#: times as long below (an LSTM of 64 to 384 states), and 0.8 to 0.4 of the time above (512 states; 128 for 8
#: sequences); its GRU takes 0.8 to 0.9 for more than two sequences (AVX2, v3.2, one thread)
_FEW_SEQUENCES: Final = 2
_MOST_NBYTES: Final = {"lstm": (3 << 20, 1 << 20), "gru": (3 << 20, 0)}

_TENSORS = ("src_layer", "src_iter", "src_iter_c", "weights_layer", "weights_iter", "bias")
_RESULTS = ("dst_layer", "dst_iter", "dst_iter_c")

Pair = c_int64 * 2


class RecurrentArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in (*_TENSORS, *_RESULTS, "table", "areas")),
        *((name, c_uint64) for name in ("tasks", "sequences", "area", "blocks", "tiles")),
        *((name, c_uint64) for name in ("state_nbytes", "padded_nbytes", "row_nbytes", "rows_nbytes", "cell")),
        *(
            (f"{name}_{part}", c_uint64)
            for name in ("layer", "iter")
            for part in ("nbytes", "block_nbytes", "blocks", "rest")
        ),
        *((f"{name}_row", c_int64) for name in ("src", "dst")),
        *((f"{name}_{part}", Pair) for name in ("src", "dst") for part in ("first", "step")),
    )


@dataclass(frozen=True)
class RecurrentKernel(StandaloneKernel):
    """``dst[t], h, c = step(src[t], h, c)`` for each sequence, and for the second direction from the last step on."""

    moves_freely: ClassVar[bool] = False
    overwrites = False

    #: a key of `GATES`
    kind: str
    times: int
    sequences: int
    channels: int
    states: int
    directions: int
    #: numbers from step to step, and from sequence to sequence, of src_layer and of dst_layer
    src_steps: tuple[int, int]
    dst_steps: tuple[int, int]

    @property
    def stem(self) -> str:
        """The kind of layer."""
        return self.kind

    @property
    def impl(self) -> str:
        """The kernel's name in plans and reports: its instruction set is the same everywhere."""
        return f"recurrent:{self.kind}:{AVX2.name}"

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        sizes = (self.times, self.sequences, self.channels, self.states)
        nbytes = 4 * GATES[self.kind] * self.states**2 * self.sequences
        return serves() and 0 not in sizes and nbytes <= _MOST_NBYTES[self.kind][self.sequences > _FEW_SEQUENCES]

    def assembled(self) -> Kernel:
        """Return the code; layers of a kind share it, but for what is left of their steps."""
        return assembled("recurrent_program", "recurrent", self.kind, self.times % STEPS, name=self.kind)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later. Threads share sequences and directions."""
        gates, blocks = GATES[self.kind], -(-self.states // BLOCK)
        padded, tasks = 4 * blocks * BLOCK, self.directions * self.sequences
        row = padded * SUMS
        area = STEPS * row + 3 * padded
        inputs = {"layer": self.channels, "iter": self.states}
        threads = threads_for(self.products * 4, min(threads, tasks))
        memory = (c_byte * (tasks * area + 64))()
        last = self.times - 1
        (src, src_row), (dst, dst_row) = ((4 * a, 4 * b) for a, b in (self.src_steps, self.dst_steps))
        arguments = RecurrentArguments(
            table=addressof(self.kernel.rows),
            areas=-(-addressof(memory) // 64) * 64,
            tasks=tasks,
            sequences=self.sequences,
            area=area,
            blocks=blocks,
            tiles=self.times // STEPS,
            state_nbytes=4 * self.states,
            padded_nbytes=padded,
            row_nbytes=row,
            rows_nbytes=STEPS * row,
            cell=STEPS * row + 2 * padded,
            **{f"{name}_block_nbytes": count * gates * 4 * BLOCK for name, count in inputs.items()},
            **{f"{name}_nbytes": count * gates * padded for name, count in inputs.items()},
            **{f"{name}_blocks": count // UNROLLED for name, count in inputs.items()},
            **{f"{name}_rest": count % UNROLLED for name, count in inputs.items()},
            src_row=src_row,
            dst_row=dst_row,
            src_first=Pair(0, last * src),
            src_step=Pair(src, -src),
            dst_first=Pair(0, last * dst + 4 * self.states),
            dst_step=Pair(dst, -dst),
        )
        return StandaloneWork(self.kernel, arguments, threads, keep=memory)

    @property
    def products(self) -> int:
        """Products of numbers of all steps."""
        each = GATES[self.kind] * self.states * (self.channels + self.states)
        return self.times * self.sequences * self.directions * each
