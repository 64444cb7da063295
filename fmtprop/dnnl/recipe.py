"""Creation of primitive descriptors: only this module calls ``*_primitive_desc_create``.

Owns the translation of a refusal into an error; must not know any particular primitive.
"""

from __future__ import annotations

from ctypes import byref
from typing import Any, NamedTuple

from fmtprop.dnnl import _abi
from fmtprop.dnnl.attr import PrimitiveAttr
from fmtprop.dnnl.handle import Handle
from fmtprop.dnnl.kinds import Problem
from fmtprop.dnnl.library import lib, raise_status, status_name
from fmtprop.dnnl.repro import benchdnn_line
from fmtprop.dnnl.specs import c_call
from fmtprop.system.locks import ProcessLock

_REMEDIES = {
    "unimplemented": "no implementation takes these formats and data types: use `any`, a plain format, or f32",
    "invalid_arguments": "the dimensions or parameters do not fit each other",
}
_lock = ProcessLock()
_default_attr: PrimitiveAttr | None = None


class Recipe(NamedTuple):
    """The arguments of the C function, kept alive so that it can be called again."""

    problem: Problem
    attr: PrimitiveAttr
    hint: Handle[Any] | None

    def create(self) -> _abi.dnnl_primitive_desc_t:
        """Return a new native descriptor of the first implementation; the caller owns it.

        Raises DnnlError if oneDNN refuses; the message has the operands and a benchdnn line; InputError or ShapeError
        or UnsupportedOpError if operands or parameters do not fit each other; LibraryError if this oneDNN version lacks
        the primitive.
        """
        name, arguments = c_call(self.problem)
        if self.hint is not None:
            arguments.append(self.hint.handle)
        out = _abi.dnnl_primitive_desc_t()
        status = getattr(lib(), name)(byref(out), *arguments, self.attr.handle)
        if status:
            remedy = _REMEDIES.get(status_name(status), "")
            details = "; ".join(filter(None, (str(self.problem), self._tail))) + (f" ({remedy})" if remedy else "")
            raise_status(f"dnnl_{name}", status, details, self.repro)
        return out

    @property
    def repro(self) -> str:
        """A benchdnn command line with the formats of the problem."""
        return benchdnn_line(self.problem, self.attr)

    @property
    def _tail(self) -> str:
        post_ops = " + ".join(f"{op.kind} {op.alg}".strip() for op in self.attr.ops)
        return f"post-ops {post_ops}" if post_ops else ""


def default_attr() -> PrimitiveAttr:
    """Return the default attributes: scratchpad mode user."""
    global _default_attr
    with _lock.current:
        if _default_attr is None or _default_attr.closed:
            _default_attr = PrimitiveAttr()
        return _default_attr
