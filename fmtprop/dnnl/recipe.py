"""Creating primitive descriptors: the one place that calls ``*_primitive_desc_create``.

Owns the translation of a refusal to an error; must not know any particular primitive.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import Any

from fmtprop.dnnl import _abi
from fmtprop.dnnl.attr import PrimitiveAttr
from fmtprop.dnnl.handle import Handle
from fmtprop.dnnl.library import lib, raise_status, status_name
from fmtprop.dnnl.problem import Problem
from fmtprop.dnnl.repro import benchdnn_line
from fmtprop.system.locks import ProcessLock

_REMEDIES = {
    "unimplemented": "no implementation takes these formats and data types: use `any`, a plain format, or f32",
    "invalid_arguments": "the dimensions or parameters do not fit each other",
}
_lock = ProcessLock()
_default_attr: PrimitiveAttr | None = None


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything that the C function needs, so that it can be called again.

    Parameters
    ----------
    function : str
        Name between ``dnnl_`` and ``_primitive_desc_create``.
    problem : Problem
        The same in words; keeps the operands alive.
    arguments : tuple
        C arguments before the attributes. A `Handle` stands for its pointer, which is taken at the call, so that
        it is alive then; a tuple of them for a C array.
    attr : PrimitiveAttr
    """

    function: str
    problem: Problem
    arguments: tuple[Any, ...]
    attr: PrimitiveAttr

    def create(self) -> _abi.dnnl_primitive_desc_t:
        """Return a new native descriptor of the first implementation; the caller owns it.

        Raises
        ------
        DnnlError
            If oneDNN refuses; the message holds the operands and a benchdnn line.
        LibraryError
            If this oneDNN version lacks the primitive.
        """
        name = f"{self.function}_primitive_desc_create"
        out = _abi.dnnl_primitive_desc_t()
        status = getattr(lib(), name)(byref(out), *map(_c_argument, self.arguments), self.attr.handle)
        if status:
            remedy = _REMEDIES.get(status_name(status), "")
            details = f"{self.problem}" + (f" ({remedy})" if remedy else "")
            raise_status(f"dnnl_{name}", status, details, benchdnn_line(self.problem))
        return out


def _c_argument(value: Any) -> Any:
    if isinstance(value, Handle):
        return value.handle
    if isinstance(value, tuple):
        return (_abi.dnnl_memory_desc_t * len(value))(*(desc.handle for desc in value))
    return value


def default_attr() -> PrimitiveAttr:
    """Return the attributes used where none are given: scratchpad mode user."""
    global _default_attr
    with _lock.current:
        if _default_attr is None or _default_attr.closed:
            _default_attr = PrimitiveAttr()
        return _default_attr
