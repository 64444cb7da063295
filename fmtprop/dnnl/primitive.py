"""Primitive descriptors and primitives: queries, iteration over implementations, execution.

Must not know the parameters of any particular primitive: see :mod:`fmtprop.dnnl.kinds` and `fmtprop.dnnl.specs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ctypes import byref, c_char_p, c_int
from sys import intern

from fmtprop.dnnl import _abi
from fmtprop.dnnl._abi import Arg
from fmtprop.dnnl.attr import PrimitiveAttr
from fmtprop.dnnl.desc import NativeDesc, adopt_const
from fmtprop.dnnl.engine import Stream
from fmtprop.dnnl.enums import QUERY, primitive_kind_name
from fmtprop.dnnl.handle import Handle
from fmtprop.dnnl.kinds import Problem
from fmtprop.dnnl.library import lib, raise_status
from fmtprop.dnnl.native_memory import ExecArgs, Memory
from fmtprop.dnnl.recipe import Recipe, default_attr
from fmtprop.dnnl.specs import spec_of
from fmtprop.errors import DnnlError, InputError, UnsupportedOpError
from fmtprop.layout import FormatKind
from fmtprop.system.locks import ProcessLock

# held while a sketch creates its native object; reentrant, since its hint may be a sketch too
_lock = ProcessLock()

# several times the implementations of any primitive: oneDNN may restart at one that is in its primitive cache
_MOST_IMPLEMENTATIONS = 200

_LAST_IMPL, _FAILED = (_abi.ENUMS["dnnl_status_t"][name] for name in ("last_impl_reached", "runtime_error"))
_EXEC_ARG_MD = QUERY["query_exec_arg_md"]

# Name -> (query, index). An indexed name such as "src_1" is split when it is not listed here.
_MD_QUERIES = {
    name: QUERY[f"query_{name}_md"]
    for name in ("src", "diff_src", "weights", "diff_weights", "dst", "diff_dst", "workspace", "scratchpad")
}
#: thousands of descriptors share these tuples
_keys: dict[tuple[int, int], tuple[int, int]] = {}


class PrimitiveDesc(Handle[_abi.dnnl_primitive_desc_t]):
    """One implementation of an operation, with every memory format decided.

    Made by `create`.

    `pointer`: the handle; this object becomes its owner. None for a sketch, which creates a handle on first use.
    `recipe`: problem, attributes and hint that it was created from.
    """

    handle_kind = "primitive_desc"
    __slots__ = ("_away", "_impl", "_kind", "_mds", "_own_strides", "_recipe", "index")

    def __init__(
        self,
        pointer: _abi.dnnl_primitive_desc_t | None,
        recipe: Recipe | Callable[[], Recipe],
        index: int = 0,
    ) -> None:
        super().__init__(pointer, lib().primitive_desc_destroy)
        self._recipe = recipe
        self.index = index
        self._mds: dict[tuple[int, int], NativeDesc | None] = {}
        self._impl = self._kind = ""
        self._own_strides: str | None = None
        self._away = pointer is None

    @property
    def handle(self) -> _abi.dnnl_primitive_desc_t:
        """The native pointer; a `sketch` creates it now.

        Raises HandleError if this object was closed, and DnnlError if oneDNN does not offer the implementation of a
        sketch any more.
        """
        if self._away:
            self._fetch()
        return super().handle

    @property
    def recipe(self) -> Recipe:
        """The arguments of the C function that makes it."""
        if not isinstance(self._recipe, Recipe):
            self._recipe = self._recipe()
        return self._recipe

    @property
    def closed(self) -> bool:
        """Whether the native object is gone for good."""
        return super().closed and not self._away

    def close(self) -> None:
        """Destroy the native object now, if it is still alive."""
        self._away = False
        super().close()

    def _fetch(self) -> None:
        with _lock.current:
            if not self._away:
                return  # another thread has created it
            # The index is not enough: oneDNN repeats an implementation that is in its primitive cache, so others move.
            with PrimitiveDesc(self.recipe.create(), self.recipe) as walker:
                if not any(map(self._is_like, walker.walk())):
                    details = f"{self.impl} is not offered any more; was the number of threads changed meanwhile?"
                    raise DnnlError("dnnl_primitive_desc_next_impl", "last_impl_reached", details, self.repro)
                self._own(_clone(walker))
                self.index = walker.index
            self._away = False

    def _is_like(self, other: PrimitiveDesc) -> bool:
        return other.impl == self.impl and all(other._query(*key) == md for key, md in self._mds.items())

    @property
    def impl(self) -> str:
        """Name of the implementation, such as ``"brgconv:avx512_core"`` (``impl_info_str``)."""
        if not self._impl:
            out = c_char_p()
            query = QUERY["query_impl_info_str"]
            raise_status("dnnl_primitive_desc_query", lib().primitive_desc_query(self.handle, query, 0, byref(out)))
            self._impl = intern((out.value or b"").decode())  # thousands of descriptors share a few names
        return self._impl

    @property
    def kind(self) -> str:
        """Name of the primitive in oneDNN, such as ``"convolution"``."""
        if not self._kind:
            out = c_int()
            query = QUERY["query_primitive_kind"]
            raise_status("dnnl_primitive_desc_query", lib().primitive_desc_query(self.handle, query, 0, byref(out)))
            self._kind = primitive_kind_name(out.value)
        return self._kind

    @property
    def is_reference(self) -> bool:
        """Whether this is oneDNN's slow reference code: ``ref``, but not a wrapper over real kernels."""
        return self.impl.startswith(("ref:", "ref_")) and "fused" not in self.impl

    def query_md(self, name: str) -> NativeDesc | None:
        """Return the descriptor of an operand.

        `name`: ``src``, ``weights``, ``dst``, ``workspace``, ``scratchpad``, their ``diff_`` forms, with an index:
        ``src_1``, or an execution argument: ``bias``, ``src_layer``.
        """
        base, position = name, 0
        head, _, tail = base.rpartition("_")
        if base not in _MD_QUERIES and tail.isdigit():
            base, position = head, int(tail)
        if base not in _MD_QUERIES and name.upper() in Arg.__members__:
            return self.arg_md(Arg[name.upper()])
        if base not in _MD_QUERIES:
            known = ", ".join(_MD_QUERIES)
            raise UnsupportedOpError(f"{self.kind}: unknown operand {name!r}; use one of {known}, src_1, bias, …")
        return self._query(_MD_QUERIES[base], position)

    def arg_md(self, arg: int) -> NativeDesc | None:
        """Return the descriptor that an execution argument must have."""
        return self._query(_EXEC_ARG_MD, int(arg))

    @property
    def scratchpad_nbytes(self) -> int:
        """Bytes of scratchpad that each concurrent execution needs."""
        scratchpad = self.query_md("scratchpad")
        return scratchpad.nbytes if scratchpad is not None else 0

    @property
    def own_strides(self) -> str:
        """Strides that only `any` gives: those of axes of size 1, by which kernels choose how to sum up.

        They are no part of a format. Empty for almost every primitive.
        """
        if self._own_strides is None:
            self._own_strides = ", ".join(self._strides_of_ones())
        return self._own_strides

    def _strides_of_ones(self) -> Iterator[str]:
        for name, asked in self.problem.operands():
            md = self.query_md(name) if asked.is_any else None
            if md is None or 1 not in md.dims or md.desc.kind is not FormatKind.BLOCKED:
                continue
            if md.fields.strides != NativeDesc.from_desc(md.desc).fields.strides:
                yield f"{name} {'x'.join(map(str, md.fields.strides))}"

    @property
    def problem(self) -> Problem:
        """The operands and parameters of the primitive."""
        return self.recipe.problem

    @property
    def repro(self) -> str:
        """A benchdnn command line for this operation, with the formats of the problem."""
        return self.recipe.repro

    def clone(self) -> PrimitiveDesc:
        """Return another owner of the same implementation; it keeps the answers of earlier queries."""
        return self._with_answers(PrimitiveDesc(_clone(self), self._recipe, self.index))

    def sketch(self) -> PrimitiveDesc:
        """Return the same implementation without a native object; it keeps the answers of earlier queries.

        A sketch creates its native object on first use. A native object takes 15 kB; planning queries thousands of
        descriptors and uses few of them.
        """
        return self.remade(self._recipe)

    def remade(self, recipe: Recipe | Callable[[], Recipe]) -> PrimitiveDesc:
        """Return the same implementation for a recipe that differs in numbers alone, such as those of post-ops."""
        return self._with_answers(PrimitiveDesc(None, recipe, self.index))

    def _with_answers(self, other: PrimitiveDesc) -> PrimitiveDesc:
        other._impl, other._kind = self.impl, self.kind  # they identify the implementation
        other._mds.update(self._mds)
        return other

    def implementations(self) -> Iterator[PrimitiveDesc]:
        """Yield this implementation and all later ones, in oneDNN's order of preference."""
        yield self
        # dnnl_primitive_desc_next_impl changes its argument, and a clone loses its position in the list. So a fresh
        # descriptor iterates, and each implementation is cloned.
        with PrimitiveDesc(self.recipe.create(), self.recipe) as walker:
            yield from (place.clone() for place in walker.walk() if place.index > self.index)

    def walk(self) -> Iterator[PrimitiveDesc]:
        """Iterate over the implementations with this one object, beginning with the present one.

        For callers that look at many implementations and keep few: `sketch` returns an object that keeps the present
        one.
        """
        while self.index < _MOST_IMPLEMENTATIONS:
            yield self
            status = lib().primitive_desc_next_impl(self.handle)
            if status == _LAST_IMPL:
                return
            if status:  # the message would take longer than the call
                raise_status("dnnl_primitive_desc_next_impl", status, f"after number {self.index} of {self.problem}")
            self.index += 1
            self._mds.clear()  # answers of the last implementation
            self._impl = ""

    def _query(self, what: int, index: int) -> NativeDesc | None:
        key = (what, index)
        if key not in self._mds:
            key = _keys.setdefault(key, key)
            self._mds[key] = adopt_const(lib().primitive_desc_query_md(self.handle, what, index))
        return self._mds[key]

    def __repr__(self) -> str:
        return "PrimitiveDesc(closed)" if self.closed else f"PrimitiveDesc({self.kind}, {self.impl})"


def _clone(desc: PrimitiveDesc) -> _abi.dnnl_primitive_desc_t:
    out = _abi.dnnl_primitive_desc_t()
    raise_status("dnnl_primitive_desc_clone", lib().primitive_desc_clone(byref(out), desc.handle))
    return out


def create(problem: Problem, attr: PrimitiveAttr | None = None, hint: PrimitiveDesc | None = None) -> PrimitiveDesc:
    """Create a primitive descriptor.

    `attr`: default: scratchpad mode user, nothing else. `hint`: for a gradient: the ``forward_training`` descriptor of
    the same kind. Raises DnnlError if oneDNN refuses; the message has the operands and a benchdnn line; InputError if
    an operand is missing, or does not belong to this direction; ShapeError if a number does not fit the operands;
    UnsupportedOpError if oneDNN has no such propagation kind or algorithm; LibraryError if this oneDNN version lacks
    the primitive.
    """
    if hint is not None or problem.prop.startswith("backward"):
        _check_hint(problem, hint)
    recipe = Recipe(problem, attr if attr is not None else default_attr(), hint)
    return PrimitiveDesc(recipe.create(), recipe)


def _check_hint(problem: Problem, hint: PrimitiveDesc | None) -> None:
    """Refuse a wrong hint: oneDNN casts it without a check, and crashes."""
    spec = spec_of(problem.kind, problem.prop)
    wanted = f"hint must be the forward_training descriptor of the same {problem.kind}"
    if not spec.takes_hint:
        details = f"a {problem.prop} {problem.kind} takes no hint"
    elif not isinstance(hint, PrimitiveDesc):
        details = f"{wanted}, not {hint!r}"
    elif hint.problem.kind != problem.kind or hint.problem.prop != "forward_training":
        details = f"{wanted}, not {hint!r} ({hint.problem.prop})"
    else:
        return
    raise DnnlError(f"dnnl_{spec.function}_primitive_desc_create", "invalid_arguments", details)


class Primitive(Handle[_abi.dnnl_primitive_t]):
    """Compiled code of a primitive descriptor. Several threads may execute it at once.

    Raises DnnlError if code generation fails.
    """

    handle_kind = "primitive"
    __slots__ = ("desc",)

    def __init__(self, desc: PrimitiveDesc) -> None:
        out = _abi.dnnl_primitive_t()
        status = lib().primitive_create(byref(out), desc.handle)
        if status:
            # Xbyak keeps the error of code that it could not generate (3.2.0)
            spoilt = "; no further code may be generated in this process: start another" if status == _FAILED else ""
            raise_status("dnnl_primitive_create", status, f"{desc}{spoilt}", desc.repro)
        super().__init__(out, lib().primitive_destroy)
        self.desc = desc

    def execute(self, stream: Stream, arguments: Mapping[int | Arg, Memory]) -> None:
        """Check every argument, execute once and wait for the result.

        `arguments`: argument number -> memory, including a scratchpad of more than 0 bytes. Raises DnnlError if an
        argument is missing or execution fails.
        """
        for arg, memory in arguments.items():
            self._check_argument(int(arg), memory)
        wanted = self.desc.query_md("scratchpad")
        if wanted is not None and wanted.nbytes and Arg.SCRATCHPAD not in arguments:
            raise InputError(f"{self.desc}: no SCRATCHPAD given; it needs {wanted.nbytes} bytes (scratchpad_nbytes)")
        execution = ExecArgs(list(arguments.items()))
        status = lib().primitive_execute(self.handle, stream.handle, execution.count, execution.array)
        if status:
            names = ", ".join(f"{_arg_name(int(arg))}: {memory.desc}" for arg, memory in arguments.items())
            given = {int(arg) for arg in arguments}
            absent = [_arg_name(arg) for arg in Arg if arg not in given and self.desc.arg_md(arg) is not None]
            details = f"{self.desc} with {names}; not given: {', '.join(absent) or 'nothing'}"
            raise_status("dnnl_primitive_execute", status, details, self.desc.repro)
        stream.wait()

    def _check_argument(self, arg: int, memory: Memory) -> None:
        wanted = self.desc.arg_md(arg)
        name = _arg_name(arg)
        if wanted is None and arg < Arg.ATTR_SCALES:
            raise InputError(f"{self.desc} takes no argument {name} (given: {memory.desc})")
        # oneDNN has no descriptors for the arguments of some attributes, such as a prelu post-op's slopes.
        if wanted is not None and wanted != memory.desc:
            raise InputError(f"{self.desc}, argument {name}: memory is {memory.desc} but must be {wanted}; reorder it")
        if memory.pointer is None and memory.desc.nbytes:
            raise InputError(f"{self.desc}, argument {name}: the memory has no buffer; call set_data_handle first")


def _arg_name(arg: int) -> str:
    if arg >= Arg.ATTR_MULTIPLE_POST_OP_BASE:
        index, rest = divmod(arg, Arg.ATTR_MULTIPLE_POST_OP_BASE)
        return f"ATTR_MULTIPLE_POST_OP({index - 1})|{_arg_name(rest)}"
    if arg >= Arg.MULTIPLE_SRC and arg < Arg.MULTIPLE_DST:
        return f"MULTIPLE_SRC+{arg - Arg.MULTIPLE_SRC}"
    try:
        return Arg(arg).name.removesuffix("_0")
    except ValueError:
        return str(arg)
