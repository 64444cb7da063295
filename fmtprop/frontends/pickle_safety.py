"""Read the pickle of a ``torch.save`` file without running it, and refuse whatever is more than tensors.

A pickle is a program: one instruction names any function, another calls it. The check runs the program on paper: it
follows the instructions that PyTorch's own pickles consist of, with a stack of what is known about each value, and
stops at the first one that is not on the list. Functions are allowed by name; there is no list of forbidden ones.

It must not know about archives of models; :mod:`fmtprop.frontends.pt2_safety` says which members are pickles.

References
----------
Python library reference, "pickletools"; ``torch/_weights_only_unpickler.py``, whose list is longer.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from fmtprop.errors import ImportModelError
from fmtprop.frontends.source_text import is_text
from fmtprop.frontends.strict_zip import read_members

#: Largest pickle that is looked at, in bytes; the tensors' data lie outside it.
LARGEST_PICKLE: Final = 64 << 20

#: What may be called: (module, name).
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

#: Storage classes, which stand in the description of a tensor's data, and their bytes per element.
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

# Notes that the exporter leaves on example inputs of dynamic size.
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


class _Made(NamedTuple):
    """The result of a call."""

    by: _Global


class _Kind:
    """A value of which only the kind matters."""


_DATA, _LIST = _Kind(), _Kind()


class _Dict:
    """A dictionary, of which the keys matter."""

    def __init__(self) -> None:
        self.keys: list[Any] = []


def check_tensor_file(data: memoryview, where: str) -> None:
    """Check that a file written by ``torch.save`` holds tensors and plain data only.

    Parameters
    ----------
    data : memoryview
        The whole file, in bytes. An empty one is what PyTorch writes for "no value".
    where : str
        How messages name it.

    Raises
    ------
    ImportModelError
        Loading it would call something that is not on the list, or it is not such a file.
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
    """Follow a pickle without running it.

    Parameters
    ----------
    program : bytes
        The pickle.
    where : str
        How messages name it.
    records : mapping of str to int
        Size in bytes of each record of tensor data, by its key.

    Raises
    ------
    ImportModelError
        It names or calls something that is not on the list, uses an instruction that PyTorch does not write, reads
        past a record, or is damaged.
    """
    if len(program) > LARGEST_PICKLE:
        raise ImportModelError(f"{where} is a pickle of {len(program)} bytes; the limit is {LARGEST_PICKLE}")
    machine = _Machine(program, where, records)
    try:
        for opcode, argument, position in pickletools.genops(program):
            machine.step(opcode.name, argument, position or 0)
    # Python warns of a backslash that begins no escape: an error where the caller made warnings errors
    except (ValueError, IndexError, OverflowError, struct.error, DeprecationWarning) as error:
        raise ImportModelError(f"{where} is a damaged pickle: {error}") from error


class _Machine:
    """The unpickler's stack and memo, with what is known about each value instead of the value."""

    def __init__(self, program: bytes, where: str, records: Mapping[str, int]) -> None:
        self.program = program
        self.where = where
        self.records = records
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def step(self, opcode: str, argument: Any, position: int) -> None:
        """Follow one instruction."""
        action = _ACTIONS.get(opcode)
        if action is None:
            raise self.refusal(f"uses the pickle instruction {opcode}", position)
        action(self, argument, position)

    def refusal(self, what: str, position: int) -> ImportModelError:
        return ImportModelError(f"{self.where} {what} (at byte {position}); {_TRUST}")

    def push_global(self, module: Any, name: Any, position: int) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise self.refusal("names a function by strings that it computes", position)
        named = _Global(module, name)
        data = module == "torch" and (name in STORAGES or name in DTYPES or name == "Tensor")
        if named not in CALLABLE and not data:
            raise self.refusal(f"names {named}, which is not on the list of tensor functions", position)
        self.stack.append(named)

    def remember(self, index: int, position: int) -> None:
        # Sequential, as every pickler writes it: a huge index makes the unpickler allocate a table of that size.
        if index != len(self.memo):
            raise self.refusal(f"stores memo entry {index} where {len(self.memo)} is next", position)
        self.memo.append(self.top(position))

    def top(self, position: int) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise self.refusal("takes a value from an empty stack", position)
        return self.stack[-1]

    def pop(self, position: int) -> Any:
        self.top(position)
        return self.stack.pop()

    def pop_to_mark(self, position: int) -> tuple[Any, ...]:
        if not self.marks:
            raise self.refusal("takes values up to a mark that is not there", position)
        at = self.marks.pop()
        values = tuple(self.stack[at:])
        del self.stack[at:]
        return values

    def pop_items(self, many: bool, count: int, position: int) -> tuple[Any, ...]:
        """Take what is put into a dictionary or list off the stack."""
        if many:
            return self.pop_to_mark(position)
        return tuple([self.pop(position) for _ in range(count)][::-1])


def _push(value: Any) -> Callable[[_Machine, Any, int], None]:
    return lambda machine, argument, position: machine.stack.append(value)


def _push_argument(machine: _Machine, argument: Any, position: int) -> None:
    machine.stack.append(argument)


def _mark(machine: _Machine, argument: Any, position: int) -> None:
    machine.marks.append(len(machine.stack))


def _protocol(machine: _Machine, argument: Any, position: int) -> None:
    if argument > pickle.HIGHEST_PROTOCOL:
        raise machine.refusal(f"is written in pickle protocol {argument}, which does not exist", position)


def _nothing(machine: _Machine, argument: Any, position: int) -> None:
    """FRAME says how the rest is written."""


def _global(machine: _Machine, argument: Any, position: int) -> None:
    module, _, name = argument.partition(" ")
    # pickletools undoes backslash escapes in names; the unpickler does not. Insist on what is written.
    written = f"{module}\n{name}\n".encode()
    if machine.program[position + 1 : position + 1 + len(written)] != written:
        raise machine.refusal("names a function in a disguised way", position)
    machine.push_global(module, name, position)


def _stack_global(machine: _Machine, argument: Any, position: int) -> None:
    name = machine.pop(position)
    module = machine.pop(position)
    machine.push_global(module, name, position)


def _reduce(machine: _Machine, argument: Any, position: int) -> None:
    arguments = machine.pop(position)
    function = machine.pop(position)
    if not isinstance(function, _Global) or function not in CALLABLE:
        what = str(function) if isinstance(function, _Global) else "a value that it computed"
        raise machine.refusal(f"calls {what}", position)
    if not isinstance(arguments, tuple) or isinstance(arguments, (_Global, _Made)):
        raise machine.refusal(f"calls {function} with something other than a tuple", position)
    if function.name == "_rebuild_from_type_v2":
        _check_rebuild_from_type(machine, arguments, position)
    machine.stack.append(_Made(function))


def _check_rebuild_from_type(machine: _Machine, arguments: tuple[Any, ...], position: int) -> None:
    """Allow a plain tensor with the exporter's notes: the function calls its first argument and sets attributes."""
    match arguments:
        case (_Global("torch._utils", "_rebuild_tensor_v2"), _Global("torch", "Tensor"), tuple(), _Dict() as state) if (
            all(isinstance(key, str) and _NOTE_ON_TENSOR.fullmatch(key) for key in state.keys)
        ):
            pass
        case _:
            raise machine.refusal("rebuilds something other than a plain tensor", position)


def _push_dict(machine: _Machine, argument: Any, position: int) -> None:
    machine.stack.append(_Dict())


def _is_ordered_dict(value: Any) -> bool:
    return isinstance(value, _Made) and value.by == ("collections", "OrderedDict")


def _build(machine: _Machine, argument: Any, position: int) -> None:
    state = machine.pop(position)
    target = machine.top(position)
    if not (_is_ordered_dict(target) and isinstance(state, _Dict)):
        raise machine.refusal("sets the state of an object that is not an OrderedDict", position)


def _set_items(many: bool) -> Callable[[_Machine, Any, int], None]:
    def action(machine: _Machine, argument: Any, position: int) -> None:
        items = machine.pop_items(many, 2, position)
        target = machine.top(position)
        # PyTorch writes keys of example inputs into source code that it executes.
        for key in _strings_in(items[::2]):
            if not is_text(key):
                raise machine.refusal(f"has the key {key!r}, with quotes or control characters", position)
        if isinstance(target, _Dict):
            target.keys.extend(items[::2])
        elif not _is_ordered_dict(target):
            raise machine.refusal("sets items of an object that is not a dictionary", position)

    return action


def _strings_in(values: tuple[Any, ...]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple) and not isinstance(value, (_Global, _Made)):
            yield from _strings_in(value)


def _append(many: bool) -> Callable[[_Machine, Any, int], None]:
    def action(machine: _Machine, argument: Any, position: int) -> None:
        machine.pop_items(many, 1, position)
        if machine.top(position) is not _LIST:
            raise machine.refusal("appends to an object that is not a list", position)

    return action


def _tuple(length: int) -> Callable[[_Machine, Any, int], None]:
    def action(machine: _Machine, argument: Any, position: int) -> None:
        values = [machine.pop(position) for _ in range(length)]
        machine.stack.append(tuple(reversed(values)))

    return action


def _tuple_to_mark(machine: _Machine, argument: Any, position: int) -> None:
    machine.stack.append(machine.pop_to_mark(position))


def _storage(machine: _Machine, argument: Any, position: int) -> None:
    """Check the description of a tensor's data: PyTorch trusts its number of elements."""
    described = machine.pop(position)
    match described:
        case ("storage", _Global("torch", kind), str(key), str(), int(count)) if kind in STORAGES:
            pass
        case _:
            raise machine.refusal("refers to something other than the data of a tensor", position)
    if key not in machine.records:
        raise machine.refusal(f"refers to record 'data/{key}', which the file has not", position)
    needed = count * STORAGES[kind]
    if count < 0 or needed > machine.records[key]:
        raise machine.refusal(
            f"reads {count} elements ({needed} bytes) of record 'data/{key}', which has {machine.records[key]} bytes",
            position,
        )
    machine.stack.append(_DATA)


def _put(machine: _Machine, argument: Any, position: int) -> None:
    machine.remember(argument, position)


def _memoize(machine: _Machine, argument: Any, position: int) -> None:
    machine.remember(len(machine.memo), position)


def _get(machine: _Machine, argument: Any, position: int) -> None:
    if argument >= len(machine.memo):
        raise machine.refusal(f"recalls memo entry {argument}, which it never stored", position)
    machine.stack.append(machine.memo[argument])


def _stop(machine: _Machine, argument: Any, position: int) -> None:
    if len(machine.stack) != 1 or machine.marks:
        raise machine.refusal("ends with something left over", position)
    if position + 1 != len(machine.program):
        raise machine.refusal(f"goes on for {len(machine.program) - position - 1} bytes after its end", position)


# The instructions that PyTorch's pickles of tensors consist of, in protocols 2 to 5. All others are refused, among
# them INST, OBJ, NEWOBJ, NEWOBJ_EX (construct any class), EXT1 to EXT4 (name a function by number) and PERSID.
_ACTIONS: Final[Mapping[str, Callable[[_Machine, Any, int], None]]] = {
    "PROTO": _protocol,
    "FRAME": _nothing,
    "MARK": _mark,
    "STOP": _stop,
    "NONE": _push(_DATA),
    "NEWTRUE": _push(_DATA),
    "NEWFALSE": _push(_DATA),
    "BININT": _push_argument,
    "BININT1": _push_argument,
    "BININT2": _push_argument,
    "LONG1": _push_argument,
    "BINFLOAT": _push(_DATA),
    "BINUNICODE": _push_argument,
    "SHORT_BINUNICODE": _push_argument,
    "EMPTY_DICT": _push_dict,
    "EMPTY_LIST": _push(_LIST),
    "EMPTY_TUPLE": _push(()),
    "TUPLE": _tuple_to_mark,
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "SETITEM": _set_items(many=False),
    "SETITEMS": _set_items(many=True),
    "APPEND": _append(many=False),
    "APPENDS": _append(many=True),
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _memoize,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "BINPERSID": _storage,
}
