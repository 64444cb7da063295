"""A run of a plan as one generated function, without loops over inputs, outputs and calls.

A loop over them takes some microseconds, as long as a short operator. Operators of PyTorch get the caller's tensors
themselves. The source has only numbered names, none of the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache, partial
from itertools import count
from types import CodeType
from typing import Any, NoReturn

import torch

from fmtprop.errors import FmtpropError
from fmtprop.ir.node import Node
from fmtprop.jit import Call
from fmtprop.ops.pytorch import empty_strided, is_any_autocast_enabled, set_grad_enabled
from fmtprop.runtime.output import Output
from fmtprop.targets.bound import REFUSED, Making, MovableMemory, PythonCalls, failed

#: a run: its context and checked inputs -> results
Run = Callable[[Any, Sequence[torch.Tensor]], list[torch.Tensor]]

_HEAD = """
def run(context, inputs):
    if autocasts():
        return context.planned(inputs)
    had_grad = has_grad()
    if had_grad:
        set_grad(False)
    try:
        node = None
"""

_TAIL = """
    except known:
        raise
    except refused as error:
        refuse(node, error)
    finally:
        if had_grad:
            set_grad(True)
"""


@lru_cache(maxsize=64)  # of a model's shapes, all plans with the same steps have one source
def _code(text: str) -> CodeType:
    return compile(text, "<string>", "exec")


def generated(
    inputs: Sequence[MovableMemory | None],
    outputs: Sequence[Output],
    calls: Iterable[Call],
    put: Container[MovableMemory],
) -> Run:
    """Return a run of calls.

    `inputs`: MovableMemory of each input; None for one that no call reads.
    """
    source = _Source(put)
    names = [f"x{i}" for i in range(len(inputs))]
    source.line(f"{''.join(f'{name}, ' for name in names) or '()'} = inputs")
    for name, memory in zip(names, inputs, strict=True):
        if memory is not None:
            source.bind(name, memory)
            source.tensors[memory] = name
    for i, output in enumerate(outputs):
        if output.is_written:
            source.line(f"y{i} = {source.new(output)}")
            source.bind(f"y{i}", output.memory)
    for call in calls:
        if isinstance(call[0], PythonCalls):
            for node, function in call[0].pairs:
                source.python(node, function)
        else:
            source.native(call)
    for i, output in enumerate(outputs):
        if not output.is_written:
            source.line(f"y{i} = {source.made(output) if output.is_made else source.copied(output)}")
    return source.run(f"y{i}" for i in range(len(outputs)))


class _Source:
    """The source of a run under construction."""

    def __init__(self, read: Container[MovableMemory]) -> None:
        self._read = read
        self._names: dict[str, Any] = {}
        self._lines: list[str] = []
        #: views of a memory -> the local variable that has the memory's tensor
        self._locals: dict[int, str] = {}
        #: memories that calls read from outside of this function
        self._put: list[str] = []
        #: memory -> the local variable that has the tensor there: the caller's, or one that a call made
        self.tensors: dict[MovableMemory, str] = {}
        #: of the local variables of tensors that calls make
        self._numbers = count()
        self._has_python = False

    def constant(self, value: object) -> str:
        """Return the name of an object."""
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name

    def line(self, text: str) -> None:
        """Add a line."""
        self._lines.append(text)

    def bind(self, name: str, memory: MovableMemory) -> None:
        """Bind a memory to the tensor of a local variable."""
        held = self.constant(memory)
        if memory in self._read:
            self.line(f"{held}.put({name})")
            self._put.append(held)
        elif memory.is_followed:
            self.line(f"p = {name}.data_ptr()")
            self.line(f"if p != {held}.pointer: {held}.point(p)")
        if (seen := memory.whole_view) is not None:
            self._locals[id(seen)] = name

    def new(self, output: Output) -> str:
        """Return the allocation of the tensor of an output."""
        return f"{self.constant(empty_strided)}({', '.join(map(self.constant, output.like))})"

    def copied(self, output: Output) -> str:
        """Return the copy of a result: of a local variable, if it is a whole tensor."""
        if reads_whole(output) and output.memory in self.tensors:
            return f"{self.new(output)}.copy_({self.tensors[output.memory]})"
        return f"{self.constant(output)}.copied()"

    def native(self, call: Call) -> None:
        """Make a native call."""
        function, *arguments = map(self.constant, call)
        self.line(f"if s := {function}({', '.join(arguments)}): context.fail({self.constant(call)}, s)")

    def python(self, node: Node, call: Callable[[], object]) -> None:
        """Make a Python call: an operator's with tensors of local variables."""
        self._has_python = True
        self.line(f"node = {self.constant(node)}")
        if isinstance(call, Making):
            self._make(call)
        elif isinstance(memory := getattr(call, "__self__", None), MovableMemory):
            self._drop(memory)
        else:
            self.line(f"{self.constant(call)}()" if not isinstance(call, partial) else self._operator(call))

    def made(self, output: Output) -> str:
        """Return the tensor that a call made for an output."""
        if reads_whole(output) and output.memory in self.tensors:
            return self.tensors[output.memory]
        self._put.append(self.constant(output.memory))
        return f"{self.constant(output.place)}.tensor()"

    def run(self, results: Iterable[str]) -> Run:
        """Return the function."""
        lines = [*self._lines, f"results = [{', '.join(results)}]", *(f"{held}.clear()" for held in self._put)]
        lines.append("return results")
        if self._has_python:
            text = _HEAD + "".join(f"        {line}\n" for line in lines) + _TAIL
        else:
            text = "def run(context, inputs):\n" + "".join(f"    {line}\n" for line in lines)
        names = {
            **self._names,
            "autocasts": is_any_autocast_enabled,
            "has_grad": torch.is_grad_enabled,
            "set_grad": set_grad_enabled,
            "known": FmtpropError,
            "refused": REFUSED,
            "refuse": _refuse,
        }
        exec(_code(text), names)
        made: Run = names.pop("run")  # not in its own globals: a cycle would keep the memory of a context
        return made

    def _make(self, call: Making) -> None:
        """Make a call that makes its results; one in another format is copied."""
        names = ["_" if memory is None else f"t{next(self._numbers)}" for memory in call.memories]
        self.line(f"{', '.join(names)} = {self._operator(call.call)}")
        if "_" in names:
            self.line("_ = None")
        shared = "".join(f", {self._argument(tensor)}" for tensor in call.operands)
        for index, (name, memory) in enumerate(zip(names, call.memories, strict=True)):
            if memory is None:
                continue
            dims, strides, dtype = map(self.constant, call.likes[index])
            own = f"{name} = {self.constant(call.own)}({index}, {name}{shared})"
            differs = f"{name}.stride() != {strides} or {name}.shape != {dims} or {name}.dtype is not {dtype}"
            self.line(own if shared else f"if {differs}: {own}")
            self.tensors[memory] = name
            self.bind(name, memory)

    def _drop(self, memory: MovableMemory) -> None:
        """Let go of a tensor that a call made and that no later call reads."""
        if memory in self.tensors:
            self.line(f"{self.tensors[memory]} = None")
        if memory not in self.tensors or memory in self._read:
            self.line(f"{self.constant(memory)}.clear()")

    def _operator(self, call: partial[Any]) -> str:
        function = call.func
        owner = self._locals.get(id(getattr(function, "__self__", None)))
        name = self.constant(function) if owner is None else f"{owner}.{function.__name__}"
        given = [self._argument(value) for value in call.args]
        given += [f"{key}={self._argument(value)}" for key, value in call.keywords.items()]
        return f"{name}({', '.join(given)})"

    def _argument(self, value: object) -> str:
        if isinstance(value, list | tuple) and any(id(tensor) in self._locals for tensor in value):
            parts = ", ".join(map(self._argument, value))
            return f"[{parts}]" if isinstance(value, list) else f"({parts},)"
        return self._locals.get(id(value)) or self.constant(value)


def read_tensors(call: Callable[[], object]) -> set[int]:
    """Return the identities of the tensors that a generated call names; a call of any other kind has none."""
    if isinstance(call, Making):
        return read_tensors(call.call) | set(map(id, call.operands))
    if not isinstance(call, partial):
        return set()
    values = [getattr(call.func, "__self__", None), *call.args, *call.keywords.values()]
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]
    return {id(item) for item in flat if isinstance(item, torch.Tensor)}


def reads_whole(output: Output) -> bool:
    """Return whether an output is a whole strided tensor."""
    return output.place.is_whole and output.place.desc.is_plain


def _refuse(node: Node, error: Exception) -> NoReturn:
    raise failed(node, node.choice.target if node.choice is not None else "", error) from error
