"""Check of the program in a ``.pt2`` archive without building it: strings that PyTorch would execute are refused.

The program is JSON, which executes nothing by itself. But PyTorch evaluates many of its strings: sizes of dynamic
shapes through sympy, which evaluates Python; guards through ``exec``; names of operators through attribute look-up
anywhere below ``torch``, so a node can call ``torch.os.system``; descriptions of nested inputs, which name modules to
import; and names of values and parameters, which become part of executed source. So every string must match the small
grammar that the exporter uses in its field. A string in an unknown field is refused.

Must not know about zip files or pickles.

References
----------
``torch/_export/serde/schema.py``, for the fields; ``torch/_export/serde/serialize.py``: ``_dict_to_dataclass``,
``_parse_sym_expr``, ``deserialize_operator``, ``deserialize_metadata``; ``torch/utils/_pytree.py``:
``enum_object_hook``, ``_defaultdict_deserialize``. For names in source: :mod:`fmtprop.archive.source_text`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from fmtprop.archive.pytorch import define_quantized_operators
from fmtprop.archive.source_text import is_name, is_path, is_text
from fmtprop.errors import ImportModelError

#: Largest JSON member that is read, in bytes.
LARGEST_JSON_NBYTES: Final = 256 << 20
#: Longest expression of a dynamic size or guard, in characters.
LONGEST_EXPRESSION_CHARACTERS: Final = 20_000
#: Largest exponent or shift that is evaluated.
LARGEST_EXPONENT: Final = 64

_TRUST = "if you trust the file, load it yourself with torch.export.load and pass the ExportedProgram"

# Classes in the exporter's sizes: sympy's and torch's own.
_SIZE_CLASSES: Final = frozenset(
    """Abs Add And BooleanFalse BooleanTrue CeilDiv CeilToInt CleanDiv Equality FloatPow FloatTrueDiv Float FloorDiv
    FloorToInt GreaterThan Identity IntTrueDiv Integer IsNonOverlappingAndDenseIndicator LShift LessThan Max Min Mod
    ModularIndexing Mul Not Or Piecewise Pow PowByNatural PythonMod RShift Rational Relational RoundDecimal RoundToInt
    StrictGreaterThan StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Unequality Where ceiling floor""".split()
)
_POWERS: Final = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift"})
_GUARD_FUNCTIONS: Final = frozenset({"max", "min", "abs", "int", "float"})
_GUARD_METHODS: Final = frozenset({"size", "stride", "storage_offset", "dim"})

_OPERATORS: Final = frozenset(
    """add and_ eq floordiv ge getitem gt invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv
    xor""".split()
)
_MATH: Final = frozenset({"ceil", "floor", "sqrt", "trunc"})
# Functions of tensors, and control flow. Other namespaces print, send data, or contain other people's code.
_TORCH_OP = re.compile(
    r"torch\.ops\.("
    r"(aten|prims|quantized_decomposed|torchvision)\.(?P<name>\w+)(\.[a-zA-Z]\w*)?|higher_order\.(?P<control>\w+))",
    re.ASCII,
)
# These operators read or write the file that a node names.
_FILE_OPS: Final = frozenset({"from_file", "save"})
_CONTROL: Final = frozenset(
    """associative_scan auto_functionalized auto_functionalized_v2 cond flex_attention hints_wrapper invoke_subgraph
    map_impl out_dtype scan strict_mode tag_activation_checkpoint while_loop with_effects wrap_activation_checkpoint
    wrap_with_autocast wrap_with_set_grad_enabled""".split()
)
# The only operators with two underscores on both sides: Python's operators, with aten's spelling.
_DUNDER_OP = re.compile(r"__i?(and|or|xor|lshift|rshift)__")
_TORCH_SIZE_OP = re.compile(r"torch\._?sym_[a-z_]+", re.ASCII)

_SYMBOL = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?(e[+-]?\d{1,4})?|inf|nan)", re.ASCII)
_KEY = re.compile(r"[\w.]{1,256}", re.ASCII)
_FACTORIES: Final = frozenset({"bool", "dict", "float", "int", "list", "set", "str", "tuple"})


def parse_json(data: bytes, where: str) -> Any:
    """Parse a JSON member of bounded size and depth."""
    if len(data) > LARGEST_JSON_NBYTES:
        raise ImportModelError(f"{where} is JSON of {len(data)} bytes; the limit is {LARGEST_JSON_NBYTES}")
    try:
        return json.loads(str(data, "utf-8"))  # PyTorch reads UTF-8; bytes could have other encodings
    except (ValueError, RecursionError) as error:
        raise ImportModelError(f"{where} is not valid JSON: {error}; export the model again") from error


def check_program(data: bytes, where: str) -> None:
    """Check a serialized exported program, and have PyTorch define the operators that it defines only on request."""
    program = parse_json(data, where)
    if b"quantized_decomposed" in data:
        define_quantized_operators()
    if not isinstance(program, dict):
        raise ImportModelError(f"{where} is not an exported program: a JSON {type(program).__name__}")
    # the field, its content, and whether it is part of a node's arguments
    pending: list[tuple[str, Any, bool]] = [("", program, False)]
    while pending:
        field, value, in_node = pending.pop()
        if isinstance(value, list):
            pending += [(field, item, in_node) for item in value]
        elif isinstance(value, dict) and field in _TABLES:
            check_key, inner = _TABLES[field]
            for key in value:
                check_key(key, where)
            pending += [(inner, item, in_node) for item in value.values()]
        elif field in _STRINGS:
            # Quotes are escaped in text arguments of a node, such as messages of assertions.
            if value is not None and not (in_node and field in ("as_string", "as_strings")):
                _STRINGS[field](value, where)
        elif isinstance(value, dict):
            pending += [(key, item, in_node or key == "nodes") for key, item in value.items()]
        elif isinstance(value, str) and value not in _FLOATS:
            raise _refusal(where, "string", value, f"the exporter writes none in {field or 'this place'!r}")


def check_relation(text: object, where: str) -> None:
    """Check a relation of sizes, which decided a branch: it is an expression like a size.

    Raises ImportModelError if it has something that would be executed, and is no part of such an expression.
    """
    _check_size(text, where)


def _refusal(where: str, kind: str, text: Any, why: str) -> ImportModelError:
    shown = repr(text)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return ImportModelError(f"{where} has the {kind} {shown}: {why}; {_TRUST}")


# ---------------------------------------------------------------- operators


def _check_operator(target: Any, where: str) -> None:
    """Check the name of an operator: PyTorch looks it up from ``torch``, ``math`` or ``operator`` on, and calls it."""
    if not isinstance(target, str):
        raise _refusal(where, "operator", target, "it is not a name")
    module, _, name = target.partition(".")
    if (module == "_operator" and name in _OPERATORS) or (module == "math" and name in _MATH):
        return
    if _TORCH_SIZE_OP.fullmatch(target):
        return
    op = _TORCH_OP.fullmatch(target)
    if op is None:
        raise _refusal(where, "operator", target, "it is none of torch.ops on tensors, nor an arithmetic function")
    if op["name"] in _FILE_OPS:
        raise _refusal(where, "operator", target, "it opens a file that the program names")
    if op["control"] and op["control"] not in _CONTROL:
        raise _refusal(where, "operator", target, "it is no control flow that fmtprop knows")
    if op["name"] and op["name"].startswith("__") and not _DUNDER_OP.fullmatch(op["name"]):
        raise _refusal(where, "operator", target, "it is none of torch.ops on tensors, nor an arithmetic function")


# ---------------------------------------------------------------- names


def _checked(kind: str, fits: Callable[[str], bool], rule: str) -> Callable[[Any, str], None]:
    def check(text: Any, where: str) -> None:
        if not isinstance(text, str):
            raise _refusal(where, kind, text, "it is not a string")
        if not fits(text):
            raise _refusal(where, kind, text, rule)

    return check


_check_name = _checked("name", is_name, "it is not a Python identifier; rename it before you export the model")
#: Check the path of a parameter, buffer or module.
check_path: Final = _checked(
    "path",
    is_path,
    "torch writes it into source code, which it could break; rename it before you export the model",
)
_check_text = _checked("text", is_text, "it has quotes, a backslash or control characters, which torch does not escape")


def _check_note(text: Any, where: str) -> None:
    """Accept everything: PyTorch only stores this string."""


# ---------------------------------------------------------------- sizes and guards


def _parse(text: Any, kind: str, where: str) -> ast.expr:
    if not isinstance(text, str):
        raise _refusal(where, kind, text, "it is not a string")
    if len(text) > LONGEST_EXPRESSION_CHARACTERS:
        raise _refusal(where, kind, text, f"it has {len(text)} characters, more than {LONGEST_EXPRESSION_CHARACTERS}")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refusal(where, kind, text, f"it is not an expression ({error})") from error


def _check_size(text: Any, where: str) -> None:
    """Check a size such as ``Mul(Integer(2), Symbol('s77', positive=True, integer=True))``, or ``2*s77``."""
    pending: list[ast.AST] = [_parse(text, "size expression", where)]
    while pending:
        node = pending.pop()
        match node:
            case ast.Constant(value=bool() | int() | float()) | ast.Name(id="True" | "False"):
                pass
            case ast.Name(id=name) if _SYMBOL.fullmatch(name) and "__" not in name:
                pass
            case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))], keywords=assumptions):
                fine = _SYMBOL.fullmatch(name) and all(isinstance(a.value, ast.Constant) for a in assumptions)
                if not fine or any(type(a.value.value) is not bool for a in assumptions):  # type: ignore[attr-defined]
                    raise _refusal(where, "size expression", text, f"{name!r} is not a symbol")
            case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(number))], keywords=[*_]):
                if not _NUMBER.fullmatch(number) or [k.arg for k in node.keywords] not in ([], ["precision"]):
                    raise _refusal(where, "size expression", text, f"{number!r} is not a number")
                pending.extend(keyword.value for keyword in node.keywords)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _SIZE_CLASSES:
                if name in _POWERS:
                    _check_exponent(arguments[1:], text, where)
                pending.extend(arguments)
            case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare():
                _check_exponent(_exponents(node), text, where)
                pending += _operands(node)
            case _:
                raise _refusal(where, "size expression", text, f"{_source(node)} is not part of a size")


def _operands(node: ast.AST) -> list[ast.expr]:
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _exponents(node: ast.AST) -> list[ast.expr]:
    """Return the exponents or shifts of an operation."""
    return [node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)) else []


def _check_exponent(exponents: list[ast.expr], text: str, where: str) -> None:
    """Refuse large exponents: sympy's evaluation of a constant power could fill the memory."""
    for exponent in exponents:
        for node in ast.walk(exponent):
            if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) > LARGEST_EXPONENT:
                raise _refusal(where, "size expression", text, f"the exponent {node.value} is too large")


def _check_guard(text: Any, where: str) -> None:
    """Check a guard such as ``L['x'].size()[0] // 2 != 1``: comparisons of sizes of the inputs ``L``."""
    pending: list[ast.AST] = [_parse(text, "guard", where)]
    while pending:
        node = pending.pop()
        match node:
            case ast.Constant(value=bool() | int() | float() | None) | ast.Name(id="L"):
                pass
            case ast.Subscript(value=value, slice=ast.Constant(value=str(key))) if _KEY.fullmatch(key):
                pending.append(value)
            case ast.Subscript(value=value, slice=ast.Constant(value=int()) as index):
                pending += [value, index]
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]) if name in _GUARD_METHODS:
                pending.append(value)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
                name in _GUARD_FUNCTIONS or name in _SIZE_CLASSES - {"Symbol", "Float"}
            ):
                pending.extend(arguments)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="sym_max" | "sym_min"), args=arguments, keywords=[]
            ):  # since PyTorch 2.14; no other name of torch is allowed
                pending.extend(arguments)
            case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() if not _exponents(node):
                pending += _operands(node)
            case _:
                raise _refusal(where, "guard", text, f"{_source(node)} is not part of a comparison of sizes")


def _source(node: ast.AST) -> str:
    try:
        shown = ast.unparse(node)
    except RecursionError:
        return f"a deeply nested {type(node).__name__}"
    return repr(shown if len(shown) <= 60 else shown[:57] + "...")


# ---------------------------------------------------------------- nested inputs and outputs


def _check_treespec(text: Any, where: str) -> None:
    """Check the description of nested inputs or outputs: it must not cause an import of modules."""
    if not isinstance(text, str):
        raise _refusal(where, "input description", text, "it is not a string")
    pending: list[Any] = [parse_json(text.encode(), where)] if text else []
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, str):
            _check_text(value, where)
        elif isinstance(value, dict):
            pending.extend(_checked_entries(value, text, where))


def _checked_entries(entries: Mapping[str, Any], text: str, where: str) -> list[Any]:
    """Check one part of a description; return its parts that must still be checked."""
    if "__enum__" in entries or "fqn" in entries:
        raise _refusal(where, "input description", text, "it names a module to import for an enum")
    if (module := entries.get("default_factory_module", "builtins")) != "builtins":
        raise _refusal(where, "input description", text, f"it names the module {module!r} to import")
    if (factory := entries.get("default_factory_name", "list")) not in _FACTORIES:
        raise _refusal(where, "input description", text, f"it names the function {factory!r}")
    rest = [*entries, *(value for key, value in entries.items() if key != "context")]
    context = entries.get("context")
    try:
        rest.append(json.loads(context) if isinstance(context, str) else context)
    except (ValueError, RecursionError):
        rest.append(context)  # a type may have any text here; only JSON can cause an import
    return rest


def _check_in_spec(text: Any, where: str) -> None:
    """Check the description of the arguments: keyword arguments become arguments in the source."""
    _check_treespec(text, where)
    match json.loads(text or "null"):
        case [_, {"children_spec": [_, {"context": str(keywords)}]}]:
            names = json.loads(keywords)
            for name in names if isinstance(names, list) else []:
                _check_name(name, where)


# ---------------------------------------------------------------- fields

_FLOATS: Final = frozenset({"Infinity", "-Infinity", "NaN"})

#: Fields of strings, and of lists of strings.
_STRINGS: Final[Mapping[str, Callable[[Any, str], None]]] = {
    "expr_str": _check_size,
    "guards_code": _check_guard,
    "target": _check_operator,
    "as_operator": _check_operator,
    "in_spec": _check_in_spec,
    "out_spec": _check_treespec,
    **dict.fromkeys(("name", "as_name", "user_input_name", "forward_arg_names", "field_names"), _check_name),
    **dict.fromkeys(("type", "verifiers"), _check_name),
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name"), check_path),
    **dict.fromkeys(("fqn", "class_fqn"), check_path),
    **dict.fromkeys(("as_string", "as_strings", "torch_version"), _check_text),
    "metadata item": _check_note,
}

#: Fields with data as keys -> check of a key, and the field by which a value is checked.
_TABLES: Final[Mapping[str, tuple[Callable[[Any, str], None], str]]] = {
    **dict.fromkeys(("tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values"), (_check_name, "")),
    **dict.fromkeys(("custom_obj_values", "range_constraints", "opset_version"), (_check_name, "")),
    "as_string_to_argument": (_check_name, ""),
    "treespec_namedtuple_fields": (check_path, ""),
    "metadata": (_check_name, "metadata item"),
}
