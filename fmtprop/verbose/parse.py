"""One line of oneDNN's log, of v3.x, v2.x or v1.x.

Version of the format, timestamp and component may stand before the word ``exec``, or not.

::

    onednn_verbose,v1,primitive,exec,cpu,KIND,IMPLEMENTATION,PROPAGATION,FORMATS,ATTRIBUTES,AUXILIARY,PROBLEM,MILLISECONDS
    onednn_verbose,primitive,exec,cpu,KIND,…
    dnnl_verbose,1699999.5,exec,cpu,KIND,…
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Execution", "Operand", "parse_line"]

_MARKER = re.compile(r"(?:onednn|dnnl|mkldnn)_verbose,")
#: fields before the word ``exec``: version of the format, timestamp, component
_HEADER = 4
#: characters; oneDNN's own buffer for a line is a fraction
_LONGEST = 1 << 14
_OPERAND = re.compile(r"(\w+?)[_:]([a-z]+\d[a-z0-9_]*):[^:]*:blocked:(\w+)")

#: sizes of a tensor, each of at most as many digits as a 64-bit number has
_SIZES = re.compile(r"[0-9]{1,19}(?:x[0-9]{1,19}){0,11}")
_NBYTES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "tf32": 4, "bf16": 2, "f16": 2}


class Operand(NamedTuple):
    """A tensor of an execution: its role, data type and format tag."""

    role: str
    dtype: str
    tag: str


@dataclass(frozen=True)
class Execution:
    """One execution of a primitive.

    Parameters
    ----------
    kind, impl, prop : str
        Such as ``"reorder"``, ``"jit:uni"``, ``"undef"``.
    operands : tuple of Operand
        Those with a blocked or plain format.
    problem : str
        Sizes, as oneDNN spells them.
    seconds : float
        What it took.
    """

    kind: str
    impl: str
    prop: str
    operands: tuple[Operand, ...]
    problem: str
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes that a reorder reads and writes, without padding; 0 where the line does not tell."""
        if _SIZES.fullmatch(self.problem) is None:
            return 0
        return math.prod(map(int, self.problem.split("x"))) * sum(
            _NBYTES.get(operand.dtype, 1) for operand in self.operands[:2]
        )


def parse_line(line: str) -> Execution | None:
    """Return the execution that a line reports, None if it reports none.

    Parameters
    ----------
    line : str
        Of any program's output; what another thread printed before the marker is left out.

    Examples
    --------
    >>> line = "onednn_verbose,exec,cpu,reorder,jit:uni,undef,src_f32::blocked:ab:f0 dst_f32::blocked:ba:f0,,,2x3,0.5"
    >>> parse_line(line).operands[1].tag, parse_line(line).seconds, parse_line(line).nbytes
    ('ba', 0.0005, 48)
    >>> parse_line("onednn_verbose,info,oneDNN v3.2.0") is None
    True
    """
    if "_verbose," not in line or len(line) > _LONGEST:
        return None
    start = max((match.end() for match in _MARKER.finditer(line)), default=None)
    if start is None:
        return None
    fields = line[start:].rstrip().split(",")
    try:
        begin = fields.index("exec", 0, _HEADER) + 1
        seconds = float(fields[-1]) / 1e3
    except ValueError:
        return None
    if "graph" in fields[:begin] or not 0 <= seconds < math.inf:
        return None
    if fields[begin : begin + 1] and fields[begin][:3] in ("cpu", "gpu"):  # before v1.0 there was no engine
        begin += 1
    if len(fields) - begin < 7:
        return None
    kind, impl, prop, formats = fields[begin : begin + 4]
    if not kind.isidentifier():
        return None
    return Execution(kind, impl, prop, _operands(formats), fields[-2], seconds)


@lru_cache(maxsize=4096)
def _operands(formats: str) -> tuple[Operand, ...]:
    return tuple(Operand(*match.groups()) for match in _OPERAND.finditer(formats))
