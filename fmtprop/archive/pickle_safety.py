"""Check of a ``torch.save`` file's pickle without running it: everything except tensors is refused.

A pickle is a program: one instruction names any function, another calls it. The check interprets the program
symbolically: its stack holds the known facts about each value, and it stops at the first instruction that PyTorch's
own pickles do not use. Functions are allowed by name; there is no list of forbidden ones.

It must not know about archives of models; :mod:`fmtprop.archive.pt2_safety` decides which members are pickles.

References
----------
Python library reference, "pickletools"; ``torch/_weights_only_unpickler.py``, which has a longer list.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from fmtprop.archive.source_text import is_text
from fmtprop.archive.strict_zip import read_members
from fmtprop.errors import ImportModelError

#: Largest pickle that is checked, in bytes; the tensors' data lie outside it.
LARGEST_PICKLE_NBYTES: Final = 64 << 20

#: Functions that may be called: (module, name).
CALLABLE: Final = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.serialization", "_get_layout"),
    }
)

#: Storage classes in the description of a tensor's data -> bytes per element.
STORAGES: Final = {
    "BFloat16Storage": 2,
    "BoolStorage": 1,
    "ByteStorage": 1,
    "CharStorage": 1,
    "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8,
    "DoubleStorage": 8,
    "FloatStorage": 4,
    "HalfStorage": 2,
    "IntStorage": 4,
    "LongStorage": 8,
    "ShortStorage": 2,
}

#: Data types, which are named but never called.
DTYPES: Final = frozenset(
    "bfloat16 bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 uint8".split()
)

# Attributes that the exporter sets on example inputs of dynamic size.
_NOTE_ON_TENSOR = re.compile(r"_specialize_on|_dynamo_\w+", re.ASCII)
_TENSOR_FILE_MEMBER = re.compile(
    r"data\.pkl|data/\d+|byteorder|version|\.format_version|\.storage_alignment|\.data/\w+"
)
_TRUST = (
    "fmtprop opens tensors only. If you trust the file, load it yourself with torch.export.load and pass the "
    "ExportedProgram"
)


class _Global(NamedTuple):
    """A function or class, by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Constructed(NamedTuple):
    """The result of a call."""

    by: _Global


class _Kind:
    """A value; only its kind matters."""


_DATA, _LIST = _Kind(), _Kind()


class _Dict:
    """A dictionary; its keys matter."""

    def __init__(self) -> None:
        self.keys: list[Any] = []


def check_tensor_file(data: memoryview, where: str) -> None:
    """Check that a file written by ``torch.save`` holds only tensors and plain data.

    `data`: the whole file, in bytes. PyTorch writes an empty file for "no value".
    """
    if not data:
        return
    if bytes(data[:2]) != b"PK":
        raise ImportModelError(
            f"{where} is not a zip file: a pickle of an old or a foreign format, which PyTorch would execute; {_TRUST}"
        )
    members = read_members(data, where)
    roots = {name.partition("/")[0] for name in members}
    if len(roots) != 1:
        raise ImportModelError(f"{where} has members in several folders: {', '.join(sorted(roots)[:5])}")
    records = {name.partition("/")[2]: content for name, content in members.items()}
    for name in records:
        if not _TENSOR_FILE_MEMBER.fullmatch(name):
            raise ImportModelError(
                f"{where} has member {name!r}, which torch.save does not write for tensors; {_TRUST}"
            )
    if "data.pkl" not in records:
        raise ImportModelError(f"{where} has no member 'data.pkl', so torch.save did not write it")
    sizes = {name.removeprefix("data/"): len(content) for name, content in records.items() if name.startswith("data/")}
    check_pickle(bytes(records["data.pkl"]), f"{where}: member 'data.pkl'", sizes)


def check_pickle(program: bytes, where: str, records: Mapping[str, int]) -> None:
    """Interpret a pickle symbolically, without running it.

    `records`: size in bytes of each record of tensor data, by its key.
    """
    if len(program) > LARGEST_PICKLE_NBYTES:
        raise ImportModelError(f"{where} is a pickle of {len(program)} bytes; the limit is {LARGEST_PICKLE_NBYTES}")
    machine = _Machine(program, where, records)
    try:
        for opcode, argument, position in pickletools.genops(program):
            machine.step(opcode.name, argument, position or 0)
    # Python warns about a backslash without an escape, which is an error if the caller makes warnings errors
    except (ValueError, IndexError, OverflowError, struct.error, DeprecationWarning) as error:
        raise ImportModelError(f"{where} is a damaged pickle: {error}") from error


class _Machine:
    """The unpickler's stack and memo, with known facts about each value instead of the value."""

    def __init__(self, program: bytes, where: str, records: Mapping[str, int]) -> None:
        self.program = program
        self.where = where
        self.records = records
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def step(self, opcode: str, argument: Any, position: int) -> None:
        """Interpret one instruction."""
        self.position = position
        action = _ACTIONS.get(opcode)
        self.require(action is not None, f"uses the pickle instruction {opcode}")
        action(self, argument)  # type: ignore[misc]  # None has been refused

    def require(self, fine: bool, otherwise: str) -> None:
        """Refuse the pickle if a condition is false; `otherwise` describes the fault."""
        if not fine:
            raise ImportModelError(f"{self.where} {otherwise} (at byte {self.position}); {_TRUST}")

    # ------------------------------------------------------------------ stack and memo

    def top(self) -> Any:
        self.require(len(self.stack) > (self.marks[-1] if self.marks else 0), "takes a value from an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def pop_several(self, count: int) -> tuple[Any, ...]:
        return tuple([self.pop() for _ in range(count)][::-1])

    def pop_to_mark(self) -> tuple[Any, ...]:
        self.require(bool(self.marks), "takes values up to a mark that is not there")
        at = self.marks.pop()
        values = tuple(self.stack[at:])
        del self.stack[at:]
        return values

    def mark(self, argument: Any) -> None:
        self.marks.append(len(self.stack))

    def remember(self, index: int) -> None:
        # Every pickler writes sequential indices: a huge index would make the unpickler allocate a table of that size.
        self.require(index == len(self.memo), f"stores memo entry {index} where {len(self.memo)} is next")
        self.memo.append(self.top())

    def recall(self, index: int) -> None:
        self.require(index < len(self.memo), f"recalls memo entry {index}, which it never stored")
        self.stack.append(self.memo[index])

    def protocol(self, number: int) -> None:
        known = number <= pickle.HIGHEST_PROTOCOL
        self.require(known, f"is written in pickle protocol {number}, which does not exist")

    def stop(self, argument: Any) -> None:
        self.require(len(self.stack) == 1 and not self.marks, "ends with something left over")
        rest = len(self.program) - self.position - 1
        self.require(rest == 0, f"goes on for {rest} bytes after its end")

    # ------------------------------------------------------------------ functions

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        # pickletools undoes backslash escapes in names, but the unpickler does not. Require the unescaped name.
        written = f"{module}\n{name}\n".encode()
        as_written = self.program[self.position + 1 : self.position + 1 + len(written)] == written
        self.require(as_written, "names a function in a disguised way")
        self.push_global(module, name)

    def push_global(self, module: Any, name: Any) -> None:
        computed = not (isinstance(module, str) and isinstance(name, str))
        self.require(not computed, "names a function by strings that it computes")
        named = _Global(module, name)
        data = module == "torch" and (name in STORAGES or name in DTYPES or name == "Tensor")
        self.require(named in CALLABLE or data, f"names {named}, which is not on the list of tensor functions")
        self.stack.append(named)

    def call(self, argument: Any) -> None:
        function, arguments = self.pop_several(2)
        called = str(function) if isinstance(function, _Global) else "a value that it computed"
        self.require(isinstance(function, _Global) and function in CALLABLE, f"calls {called}")
        plain = isinstance(arguments, tuple) and not isinstance(arguments, (_Global, _Constructed))
        self.require(plain, f"calls {function} with something other than a tuple")
        if function.name == "_rebuild_from_type_v2":
            self.require(_makes_plain_tensor(arguments), "rebuilds something other than a plain tensor")
        self.stack.append(_Constructed(function))

    # ------------------------------------------------------------------ containers and tensors

    def set_state(self, argument: Any) -> None:
        state, target = self.pop(), self.top()
        fine = _is_ordered_dict(target) and isinstance(state, _Dict)
        self.require(fine, "sets the state of an object that is not an OrderedDict")

    def set_items(self, items: tuple[Any, ...]) -> None:
        target = self.top()
        # PyTorch writes keys of example inputs into source code that it executes.
        for key in _strings_in(items[::2]):
            self.require(is_text(key), f"has the key {key!r}, with quotes or control characters")
        if isinstance(target, _Dict):
            target.keys.extend(items[::2])
            return
        self.require(_is_ordered_dict(target), "sets items of an object that is not a dictionary")

    def append(self, items: tuple[Any, ...]) -> None:
        self.require(self.top() is _LIST, "appends to an object that is not a list")

    def tensor_data(self, argument: Any) -> None:
        """Check the description of a tensor's data, since PyTorch trusts its number of elements."""
        match self.pop():
            case ("storage", _Global("torch", kind), str(key), str(), int(count)) if kind in STORAGES:
                needed = count * STORAGES[kind]
            case _:
                self.require(False, "refers to something other than the data of a tensor")
        self.require(key in self.records, f"refers to record 'data/{key}', which the file has not")
        stored = self.records[key]
        self.require(
            0 <= needed <= stored,
            f"reads {count} elements ({needed} bytes) of record 'data/{key}', which has {stored} bytes",
        )
        self.stack.append(_DATA)


def _makes_plain_tensor(arguments: tuple[Any, ...]) -> bool:
    """Allow a plain tensor with the exporter's attributes; the function calls its first argument and sets these."""
    match arguments:
        case (_Global("torch._utils", "_rebuild_tensor_v2"), _Global("torch", "Tensor"), tuple(), _Dict() as state):
            return all(isinstance(key, str) and _NOTE_ON_TENSOR.fullmatch(key) for key in state.keys)
    return False


def _is_ordered_dict(value: Any) -> bool:
    return isinstance(value, _Constructed) and value.by == ("collections", "OrderedDict")


def _strings_in(values: tuple[Any, ...]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple) and not isinstance(value, (_Global, _Constructed)):
            yield from _strings_in(value)


def _push(make: Callable[[Any], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, argument: machine.stack.append(make(argument))


def _nothing(machine: _Machine, argument: Any) -> None:
    """FRAME describes only the encoding of the rest."""


_push_argument, _push_data = _push(lambda argument: argument), _push(lambda argument: _DATA)

# The instructions that PyTorch's pickles of tensors consist of, in protocols 2 to 5. All others are refused, among
# them INST, OBJ, NEWOBJ, NEWOBJ_EX (construct any class), EXT1 to EXT4 (name a function by number) and PERSID.
_ACTIONS: Final[Mapping[str, Callable[[_Machine, Any], None]]] = {
    "PROTO": _Machine.protocol,
    "FRAME": _nothing,
    "MARK": _Machine.mark,
    "STOP": _Machine.stop,
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"), _push_data),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"), _push_argument),
    "EMPTY_DICT": _push(lambda argument: _Dict()),
    "EMPTY_LIST": _push(lambda argument: _LIST),
    "EMPTY_TUPLE": _push(lambda argument: ()),
    "TUPLE": lambda machine, argument: machine.stack.append(machine.pop_to_mark()),
    "TUPLE1": lambda machine, argument: machine.stack.append(machine.pop_several(1)),
    "TUPLE2": lambda machine, argument: machine.stack.append(machine.pop_several(2)),
    "TUPLE3": lambda machine, argument: machine.stack.append(machine.pop_several(3)),
    "SETITEM": lambda machine, argument: machine.set_items(machine.pop_several(2)),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.pop_to_mark()),
    "APPEND": lambda machine, argument: machine.append(machine.pop_several(1)),
    "APPENDS": lambda machine, argument: machine.append(machine.pop_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.remember),
    "MEMOIZE": lambda machine, argument: machine.remember(len(machine.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": lambda machine, argument: machine.push_global(*machine.pop_several(2)),
    "REDUCE": _Machine.call,
    "BUILD": _Machine.set_state,
    "BINPERSID": _Machine.tensor_data,
}
