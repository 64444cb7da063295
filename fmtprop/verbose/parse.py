"""One line of oneDNN's log, of any version from v0.x (MKL-DNN) to v3.x.

Version of the format, timestamp and component are optional before the word ``exec``.

::

    onednn_verbose,v1,TIMESTAMP,primitive,exec,cpu,KIND,IMPLEMENTATION,PROPAGATION,FORMATS,ATTRIBUTES,AUXILIARY,PROBLEM,MILLISECONDS
    onednn_verbose,primitive,exec,cpu,KIND,…          v3.1 to v3.3
    dnnl_verbose,exec,cpu,KIND,…                       v1.x and v2.x, until v1.2 without attributes
    mkldnn_verbose,exec,KIND,…                         v0.x, without engine and attributes
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

#: the beginning of the log's lines, which may be anywhere in a line of a program's output
MARKER = re.compile(r"(onednn|dnnl|mkldnn)_verbose,")
#: characters that the log never has: the text of a container's JSON log continues there, or a colour ends
_QUOTED = re.compile(r'["\\\x1b]')
#: a time beyond this number of milliseconds, 30 years, is none
LONGEST_MILLISECONDS = 1e12
#: characters before the word ``exec``: version of the format, timestamp, component
_HEADER = 80
#: commas from the engine to the problem
_COMMAS = 7
#: most characters of a line; oneDNN's own buffer is much smaller
_LONGEST = 1 << 14

#: a time that no character of a number or of sizes follows: another thread may continue in the same line
_TIME = re.compile(r"(\d{1,15}(?:\.\d*)?(?:e[+-]?\d{1,2})?)(?![\w.:+-])")
_CUT_TIME = re.compile(r"(\d{1,15}\.\d+(?:e[+-]\d{1,2})?)")

#: ``src:f32:a:blocked:abcd::f0`` and, until v3.5, ``src_f32::blocked:abcd:f0``
_OPERAND = re.compile(r"(\w+?)[_:]([a-z]+\d[a-z0-9_]*):[^: ]*:(\w+):(\w*)")
#: ``in:f32_nchw`` of v0.x
_OLD_OPERAND = re.compile(r"(in|out):([a-z]+\d+)_(\w+)")

#: milliseconds since 1970, in logs of ONEDNN_VERBOSE_TIMESTAMP
_TIMESTAMP = re.compile(r"_verbose,(?:v\d+,)?(\d{1,15}\.\d{1,9}),(?:primitive,)?exec,")

#: sizes of a tensor, each of at most as many digits as a 64-bit number has
_SIZES = re.compile(r"[0-9]{1,19}(?:x[0-9]{1,19}){0,11}")
_BITS = {
    "f64": 64, "s64": 64, "f32": 32, "s32": 32, "tf32": 32, "bf16": 16, "f16": 16,
    "s4": 4, "u4": 4, "f4_e2m1": 4, "f4_e3m0": 4,
}  # fmt: skip

#: an axis with blocks in a tag
_BLOCKED = re.compile("[A-Z]")

#: sizes of a convolution's weights in its problem: ``g2``, ``mb1_ic3oc32_ih32oh32kh3…``, ``mb1_g2ic4oc4_…``
_CONVOLUTION = re.compile(r"(?:.*_)?(?:g(\d+))?ic(\d+)oc(\d+)_")
_KERNEL = re.compile(r"k([dhw])(\d+)")


#: tags of activations: row-major, and channels-last
PLAIN = frozenset({"abc", "abcd", "abcde", "nchw", "ncdhw"})
LAST = frozenset({"acb", "acdb", "acdeb", "nhwc", "ndhwc"})


class LoggedTensor(NamedTuple):
    """A tensor of an execution: its role, data type and format tag."""

    role: str
    dtype: str
    tag: str


@dataclass(frozen=True)
class Execution:
    """One execution of a primitive."""

    #: `kind`, `impl`, `prop`: such as ``"reorder"``, ``"jit:uni"``, ``"undef"``
    kind: str
    impl: str
    prop: str
    operands: tuple[LoggedTensor, ...]
    #: sizes, in oneDNN's notation
    problem: str
    seconds: float
    #: its beginning, in seconds since 1970; None if the log does not tell
    start_seconds: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a reorder reads and writes, without padding; 0 if the line does not tell."""
        if _SIZES.fullmatch(self.problem) is None:
            return 0
        elements = math.prod(map(int, self.problem.split("x")))
        return sum(-(-elements * _BITS.get(operand.dtype, 8) // 8) for operand in self.operands[:2])

    @property
    def packs(self) -> bool:
        """Whether this reorder packs weights: dst has blocks that activations never have."""
        return self.kind == "reorder" and len(self.operands) > 1 and _of_weights(self.operands[1].tag)

    @property
    def unpacks(self) -> bool:
        """Whether this reorder unpacks weights, or their gradient."""
        return (
            self.kind == "reorder" and len(self.operands) > 1 and not self.packs and _of_weights(self.operands[0].tag)
        )

    @property
    def moves_activations(self) -> bool:
        """Whether this is a reorder of an activation between row-major and channels-last or blocks of channels."""
        if self.kind != "reorder" or len(self.operands) < 2:
            return False
        tags = {operand.tag for operand in self.operands[:2]}
        blocked = [tag for tag in tags if _BLOCKED.search(tag)]
        return (
            len(tags) == 2
            and not any(map(_of_weights, tags))
            and (bool(tags & LAST and tags & PLAIN) or (len(blocked) == 1 and bool(tags & (PLAIN | LAST))))
        )

    @property
    def weights_sizes(self) -> str:
        """Sizes of the weights that this reads, in the notation of reorders; empty if the line does not tell."""
        if ":" in self.problem:  # of a matmul
            return self.problem.partition(":")[2].partition(":")[0].partition("_")[0]
        found = _CONVOLUTION.match(self.problem)
        if found is None:
            return ""
        groups, ic, oc = (int(number or 1) for number in found.groups())
        kernel = [number for _, number in _KERNEL.findall(self.problem)]
        outer = [groups, oc // groups, ic // groups] if found.group(1) is not None and groups > 1 else [oc, ic]
        return "x".join(map(str, [*outer, *kernel]))


def _of_weights(tag: str) -> bool:
    """Whether a format has blocks, and other ones than activations: these have blocks of channels, after the batch."""
    return _BLOCKED.search(tag) is not None and (tag[:2] not in ("aB", "nC") or len(_BLOCKED.findall(tag)) > 1)


def executions(line: str) -> Iterator[tuple[str, float]]:
    """Yield the executions of a line: the text from the engine to the problem, and the milliseconds.

    `line`: a line of any program's output. Text before the marker is ignored. If two threads wrote into one line, both
    executions are found.
    """
    if len(line) > _LONGEST:
        return
    ends = [match.start() for match in MARKER.finditer(line)]
    ends.append(len(line))
    for start, end in pairwise(ends):
        found = _execution(line[start:end])
        if found is not None:
            yield found


def unwrapped(text: str) -> str:
    """Return a line from its marker on, without the rest of a container's JSON log."""
    return _QUOTED.split(text[max(0, text.find("_verbose,") - len("onednn")) :], 1)[0]


def _execution(text: str) -> tuple[str, float] | None:
    text = unwrapped(text)
    begin = text.find(",exec,", 0, _HEADER)
    if begin < 0 or ",graph," in text[: begin + 1]:
        return None
    # kind, implementation, propagation, formats, attributes, auxiliary and problem; the first two markers are older
    least = {"o": _COMMAS, "d": 6, "m": 5}[text[0]]
    body, _, last = text[begin + 6 :].rstrip().rpartition(",")
    whole = body.rpartition(",")[2]
    if body.count(",") > _COMMAS and whole.isdigit() and "." not in last:  # the program's language has a decimal comma
        body, last = body[: -len(whole) - 1], f"{whole}.{last}"
    while (milliseconds := _milliseconds(last)) is None and body.count(",") > least:  # fields of a newer version
        body, _, last = body.rpartition(",")
    return (body, milliseconds) if milliseconds is not None and body.count(",") >= least else None


def _milliseconds(text: str) -> float | None:
    try:
        milliseconds = float(text)
    except ValueError:
        match = _TIME.match(text) or _CUT_TIME.match(text)
        if match is None:
            return None
        milliseconds = float(match.group(1))
    return milliseconds if 0 <= milliseconds < LONGEST_MILLISECONDS else None


def parse_body(body: str) -> Execution | None:
    """Return the execution in a text from the engine to the problem, with 0 seconds; None if there is none."""
    fields = body.split(",")
    if fields[0][:3] in ("cpu", "gpu"):  # before v1.0 there was no engine
        del fields[0]
        while fields and fields[0].isdigit():  # the engine's number can be a separate field
            del fields[0]
    if len(fields) < 6:
        return None
    kind, impl, prop, formats = fields[:4]
    if not kind.isidentifier():
        return None
    return Execution(kind, impl, prop, _operands(formats), fields[-1], 0.0)


def executions_of(line: str) -> Iterator[Execution]:
    """Yield all executions that a line reports."""
    times = _TIMESTAMP.finditer(line)
    for body, milliseconds in executions(line):
        found = parse_body(body)
        if found is None:
            continue
        start = next((float(match.group(1)) / 1e3 for match in times if line.startswith(body, match.end())), None)
        yield replace(found, seconds=milliseconds / 1e3, start_seconds=start)


def parse_line(line: str) -> Execution | None:
    """Return the execution that a line reports, the last one if it has several; None if it has none.

    >>> line = "onednn_verbose,exec,cpu,reorder,jit:uni,undef,src_f32::blocked:ab:f0 dst_f32::blocked:ba:f0,,,2x3,0.5"
    >>> parse_line(line).operands[1].tag, parse_line(line).seconds, parse_line(line).nbytes
    ('ba', 0.0005, 48)
    >>> parse_line("onednn_verbose,info,oneDNN v3.2.0") is None
    True
    """
    found = list(executions_of(line))
    return found[-1] if found else None


def _operands(formats: str) -> tuple[LoggedTensor, ...]:
    found = [LoggedTensor(role, dtype, tag or kind) for role, dtype, kind, tag in _OPERAND.findall(formats)]
    return tuple(found or (LoggedTensor(*match) for match in _OLD_OPERAND.findall(formats)))
