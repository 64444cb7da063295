"""Kernel of a layer of an LSTM or a GRU of few sequences: all steps of a direction of some sequences, in one call.

For few sequences, oneDNN calls its products and functions anew in every step, with few rows each time. Here, a step
reads each weight once for all sequences of a group, in the order of memory. The products of the input do not wait for
the state: six steps of them share a load of weights.
"""

from __future__ import annotations

from ctypes import addressof, c_byte, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import ClassVar, Final

from fmtprop.jit.arguments import UNROLLED, Arguments
from fmtprop.jit.kernel import Kernel, isa, serves, threads_for
from fmtprop.jit.standalone import StandaloneKernel, StandaloneWork, assembled

#: gates of weights, by the kind of layer; a block of sums has four in both: a GRU's last one is the state's part of the
#: new gate
GATES: Final = {"lstm": 4, "gru": 3}
SUMS: Final = 4

#: steps whose products of the input are computed together, and sequences of a group at most: their sums of two gates
#: are twelve registers of the sixteen that AVX2 has
STEPS: Final = 6

#: most bytes of the weights of the state for one sequence; a quarter of them for seven to twelve, a ninth for up to
#: eighteen. Up to there, oneDNN, which reads them for all sequences at once, takes 1 to 2.3 times as long (layers of 48
#: to 512 states, AVX2 and AVX-512, v3.2, one thread); beyond, 0.85 to 1. Two to six sequences have no limit with
#: vectors of 16: of 256 to 1024 states, oneDNN takes 1.3 to 2.1 times as long
_MOST_NBYTES, _MOST_GROUPS, _LANES_WITHOUT_LIMIT = 4 << 20, 3, 16

_TENSORS = ("src_layer", "src_iter", "src_iter_c", "weights_layer", "weights_iter", "bias")
_RESULTS = ("dst_layer", "dst_iter", "dst_iter_c")

Pair = c_int64 * 2


class RecurrentArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in (*_TENSORS, *_RESULTS, "table", "areas")),
        *((name, c_uint64) for name in ("tasks", "groups", "rows", "last_group", "sequences", "blocks", "vectors")),
        *((name, c_uint64) for name in ("tiles", "area", "state", "next_state", "cell")),
        *((f"{name}_nbytes", c_uint64) for name in ("state", "padded", "padding", "row", "step")),
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
    #: groups of sequences that a step computes together
    groups: int
    #: numbers from step to step, and from sequence to sequence, of src_layer and of dst_layer
    src_steps: tuple[int, int]
    dst_steps: tuple[int, int]

    @property
    def stem(self) -> str:
        """The kind of layer."""
        return f"recurrent:{self.kind}"

    @property
    def is_offered(self) -> bool:
        """Whether this machine has such a kernel, for these sizes."""
        sizes = (self.times, self.sequences, self.channels, self.states)
        nbytes = 4 * GATES[self.kind] * self.states**2
        groups = -(-self.sequences // STEPS)
        is_small = groups <= _MOST_GROUPS and nbytes * groups**2 <= _MOST_NBYTES
        is_one_group = 1 < self.sequences <= STEPS and isa().lanes == _LANES_WITHOUT_LIMIT
        return serves() and 0 not in sizes and (is_small or is_one_group)

    @property
    def rows(self) -> int:
        """Sequences of a group; the last group begins earlier where they do not come out even."""
        return -(-self.sequences // self.groups)

    @property
    def tasks(self) -> int:
        """What threads share."""
        return self.directions * self.groups

    def assembled(self) -> Kernel:
        """Return the code; layers of a kind share it, but for what is left of their steps and for their groups."""
        options = (self.kind, self.times % STEPS, self.rows, isa())
        return assembled("recurrent_program", "recurrent", *options, name=self.kind)

    def work(self, threads: int) -> StandaloneWork:
        """Return the kernel with arguments; its tensors are set later. Threads share groups and directions."""
        gates, block = GATES[self.kind], isa().lanes
        blocks = -(-self.states // block)
        padded = 4 * blocks * block
        row = padded * SUMS
        step = self.rows * row
        sums, states = STEPS * step, self.rows * padded
        area = sums + 3 * states
        inputs = {"layer": self.channels, "iter": self.states}
        threads = threads_for(self.products * 4, min(threads, self.tasks))
        memory = (c_byte * (self.tasks * area + 64))()
        last = self.times - 1
        (src, src_row), (dst, dst_row) = ((4 * a, 4 * b) for a, b in (self.src_steps, self.dst_steps))
        arguments = RecurrentArguments(
            table=addressof(self.kernel.rows),
            areas=-(-addressof(memory) // 64) * 64,
            tasks=self.tasks,
            groups=self.groups,
            rows=self.rows,
            last_group=self.sequences - self.rows,
            sequences=self.sequences,
            area=area,
            blocks=blocks,
            vectors=self.rows * blocks,
            tiles=self.times // STEPS,
            state_nbytes=4 * self.states,
            padded_nbytes=padded,
            padding_nbytes=padded - 4 * self.states,
            row_nbytes=row,
            step_nbytes=step,
            state=sums,
            next_state=sums + states,
            cell=sums + 2 * states,
            **{f"{name}_block_nbytes": count * gates * 4 * block for name, count in inputs.items()},
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
