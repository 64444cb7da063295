"""Generate ``fmtprop/dnnl/_abi.py`` from oneDNN's public C headers.

Reads enums, argument numbers, opaque handle types and function signatures. The newest headers found are
used, since later versions only add (functions that an older library lacks are gated by symbol at run time).

Usage::

    python scripts/generate_abi.py [--include DIR] [--output FILE]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent.parent / "fmtprop" / "dnnl" / "_abi.py"
TYPE_HEADERS = ("dnnl_common_types.h", "dnnl_types.h")
FUNCTION_HEADERS = ("dnnl_common.h", "dnnl.h", "dnnl_debug.h")

SCALARS = {
    "int": "c_int",
    "unsigned": "c_uint",
    "char": "c_char",
    "float": "c_float",
    "size_t": "c_size_t",
    "dnnl_dim_t": "c_int64",
    "int8_t": "c_int8",
    "uint8_t": "c_uint8",
    "int32_t": "c_int32",
    "uint64_t": "c_uint64",
}
STRUCTS = ("dnnl_exec_arg_t", "dnnl_version_t")


@dataclass
class Abi:
    """What the headers say.

    Parameters
    ----------
    version : tuple of int
        Version of the headers.
    handles : list of str
        Opaque pointer types.
    enums : dict
        C enum type -> value name (without the ``dnnl_`` prefix) -> number.
    args : dict
        ``DNNL_ARG_*`` without the prefix -> number.
    runtimes : dict
        ``DNNL_RUNTIME_*`` without the prefix -> number.
    functions : dict
        Function name -> (result type, argument types), as Python source.
    """

    version: tuple[int, int, int]
    handles: list[str] = field(default_factory=list)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    args: dict[str, int] = field(default_factory=dict)
    runtimes: dict[str, int] = field(default_factory=dict)
    functions: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)


def header_directories() -> Iterator[Path]:
    """Yield directories of this environment that may hold ``oneapi/dnnl`` headers."""
    yield Path(sys.prefix) / "include"
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / "include"


def installed_headers() -> list[tuple[tuple[int, int, int], Path]]:
    """Return (version, include directory) of the headers found here, oldest first."""
    found = []
    for include in header_directories():
        directory = include / "oneapi" / "dnnl"
        if (directory / "dnnl_version.h").is_file():
            found.append((read_version(directory), include))
    return sorted(found)


def read_version(directory: Path) -> tuple[int, int, int]:
    """Return the version that ``dnnl_version.h`` declares."""
    text = (directory / "dnnl_version.h").read_text()
    parts = [re.search(rf"#define DNNL_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    numbers = [int(match.group(1)) for match in parts if match]
    if len(numbers) != 3:
        raise SystemExit(f"{directory}/dnnl_version.h does not declare a version")
    return numbers[0], numbers[1], numbers[2]


def read_abi(include: Path) -> Abi:
    """Parse the headers below ``include/oneapi/dnnl``."""
    directory = include / "oneapi" / "dnnl"
    abi = Abi(read_version(directory))
    for name in TYPE_HEADERS:
        # v3.0 .. v3.2 keep everything that later versions moved to dnnl_common_types.h in dnnl_types.h.
        if (directory / name).is_file():
            text = without_comments((directory / name).read_text())
            abi.args.update(read_defines(text, "DNNL_ARG_"))
            code = without_preprocessor(text)
            abi.enums.update(read_enums(code))
            abi.handles += re.findall(r"typedef struct \w+ \*(dnnl_\w+_t);", code)
    config = without_comments((directory / "dnnl_config.h").read_text())
    abi.runtimes = read_defines(config.replace("0u", "0").replace("u\n", "\n"), "DNNL_RUNTIME_")
    for name in FUNCTION_HEADERS:
        text = without_preprocessor(without_comments((directory / name).read_text()))
        abi.functions.update(read_functions(text, abi))
    return abi


def without_comments(text: str) -> str:
    """Remove C comments and join continued lines."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    return text.replace("\\\n", " ")


def without_preprocessor(text: str) -> str:
    """Remove directives; both branches of a conditional stay, since symbols are gated at run time."""
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


def read_defines(text: str, prefix: str) -> dict[str, int]:
    """Return the integer macros that start with ``prefix``; aliases are resolved."""
    values: dict[str, int] = {}
    for name, value in re.findall(rf"^#define {prefix}(\w+) +(\w+)[ \t]*$", text, flags=re.M):
        if value.isdigit():
            values[name] = int(value)
        elif value.startswith(prefix) and value[len(prefix) :] in values:
            values[name] = values[value[len(prefix) :]]
    return values


def read_enums(text: str) -> dict[str, dict[str, int]]:
    """Return every ``typedef enum``; names lose their ``dnnl_`` prefix."""
    enums = {}
    for body, name in re.findall(r"typedef enum \{([^}]*)\} (dnnl_\w+_t);", text):
        values: dict[str, int] = {}
        following = 0
        for entry in body.split(","):
            key, _, expression = (part.strip() for part in entry.partition("="))
            if not key:
                continue
            number = evaluate(expression, values) if expression else following
            values[key] = number
            following = number + 1
        enums[name] = {key.removeprefix("dnnl_"): number for key, number in values.items()}
    return enums


def evaluate(expression: str, known: dict[str, int]) -> int:
    """Evaluate a constant C expression of integers, earlier enum values, ``|``, ``<<`` and ``~``."""
    source = re.sub(r"\b(0x[0-9a-fA-F]+|\d+)[uUlL]+\b", r"\1", expression)
    return _evaluate_node(ast.parse(source.strip(), mode="eval").body, known)


def _evaluate_node(node: ast.expr, known: dict[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return known[name]
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_evaluate_node(operand, known)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _evaluate_node(left, known) | _evaluate_node(right, known)
        case ast.BinOp(left=left, op=ast.LShift(), right=right):
            return _evaluate_node(left, known) << _evaluate_node(right, known)
    raise SystemExit(f"cannot evaluate enum value {ast.dump(node)}")


def read_functions(text: str, abi: Abi) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the signature of every ``DNNL_API`` function."""
    functions = {}
    pattern = r"([\w \t\n]+?)\s+DNNL_API\s+(\*?)\s*(dnnl_\w+)\(([^)]*)\);"
    for result, star, name, parameters in re.findall(pattern, text):
        arguments = tuple(python_type(parameter, abi, named=True) for parameter in split_parameters(parameters))
        functions[name] = (python_type(f"{result} {star}", abi, named=False), arguments)
    return functions


def split_parameters(parameters: str) -> list[str]:
    """Split a C parameter list; ``(void)`` is empty."""
    parts = [" ".join(part.split()) for part in parameters.split(",")]
    return [] if parts in (["void"], [""]) else parts


def python_type(declaration: str, abi: Abi, *, named: bool) -> str:
    """Translate a C type, or a parameter with its name, to the ctypes expression that stands for it."""
    tokens = re.findall(r"\w+|\*", declaration)
    if named:
        tokens = tokens[:-1]
    stars = tokens.count("*")
    words = [token for token in tokens if token not in ("*", "const", "struct")]
    if len(words) != 1:
        raise SystemExit(f"cannot translate C type {declaration!r}")
    base = words[0].removeprefix("const_")
    if base == "char" and stars:
        base, stars = "c_char_p", stars - 1
    elif base == "void" and stars:
        base, stars = "c_void_p", stars - 1
    elif base == "dnnl_dims_t":
        base, stars = "c_int64", stars + 1
    elif base in abi.enums:
        base = "c_int"
    elif base in SCALARS:
        base = SCALARS[base]
    elif base not in abi.handles and base not in STRUCTS:
        raise SystemExit(f"unknown C type {base!r} in {declaration!r}")
    for _ in range(stars):
        base = f"POINTER({base})"
    return base


def render(abi: Abi) -> str:
    """Return the source of ``_abi.py``."""
    names = list(abi.enums["dnnl_format_tag_t"].items())
    last = abi.enums["dnnl_format_tag_t"]["format_tag_last"]
    tags = [name for name, number in names[: last + 1] if number < last]
    if any(names[i][1] != i for i in range(last)):
        raise SystemExit("format tags are not numbered consecutively: render them with their numbers")
    parts = [
        '"""oneDNN C ABI: opaque types, enums, argument numbers, signatures.\n\n'
        "Generated by scripts/generate_abi.py from the public headers; do not edit. It must know nothing but ctypes.\n"
        '"""\n\n# ruff: noqa\n# fmt: off\nfrom __future__ import annotations\n\n'
        "from ctypes import (\n    POINTER,\n    Structure,\n    c_char,\n    c_char_p,\n    c_float,\n    c_int,\n    c_int8,\n    c_int32,\n"
        "    c_int64,\n    c_size_t,\n    c_uint,\n    c_uint8,\n    c_uint64,\n    c_void_p,\n)\nfrom enum import IntEnum\nfrom typing import Any\n",
        f"HEADER_VERSION = {abi.version}\n",
        *(f"class {name}(c_void_p):\n    pass\n" for name in abi.handles),
        'class dnnl_exec_arg_t(Structure):\n    _fields_ = [("arg", c_int), ("memory", dnnl_memory_t)]\n',
        "class dnnl_version_t(Structure):\n    _fields_ = [\n"
        + "".join(
            f'        ("{name}", {kind}),\n'
            for name, kind in [
                ("major", "c_int"),
                ("minor", "c_int"),
                ("patch", "c_int"),
                ("hash", "c_char_p"),
                ("cpu_runtime", "c_uint"),
                ("gpu_runtime", "c_uint"),
            ]
        )
        + "    ]\n",
        "class Arg(IntEnum):\n"
        '    """Argument numbers of ``dnnl_primitive_execute`` (``DNNL_ARG_*``)."""\n\n'
        + "".join(f"    {name} = {number}\n" for name, number in abi.args.items())
        + "\n    @staticmethod\n    def ATTR_MULTIPLE_POST_OP(index: int) -> int:\n"
        '        """Return the argument base of post-op number ``index``; or it with ``Arg.SRC_1`` and the like."""\n'
        "        return Arg.ATTR_MULTIPLE_POST_OP_BASE * (index + 1)\n",
        "RUNTIMES = {" + ", ".join(f'"{name}": {number}' for name, number in abi.runtimes.items()) + "}\n",
        "ENUMS: dict[str, dict[str, int]] = {\n"
        + "".join(
            f'    "{enum}": {{\n'
            + "".join(f'        "{name}": {number},\n' for name, number in values.items())
            + "    },\n"
            for enum, values in abi.enums.items()
            if enum != "dnnl_format_tag_t"
        )
        + "}\n",
        '# Position = number of the tag; aliases such as nchw are left out.\nFORMAT_TAGS: tuple[str, ...] = tuple(\n    """\n'
        + textwrap.fill(" ".join(tags), 110)
        + '\n""".split()\n)\n',
        "FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {\n"
        + "".join(
            f'    "{name}": ({result}, {render_tuple(arguments)}),\n'
            for name, (result, arguments) in sorted(abi.functions.items())
        )
        + "}\n",
    ]
    return "\n\n".join(parts)


def render_tuple(items: tuple[str, ...]) -> str:
    """Return the source of a tuple of expressions."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def main() -> None:
    """Write the ABI table."""
    parser = argparse.ArgumentParser(description="Generate fmtprop/dnnl/_abi.py from oneDNN's headers.")
    parser.add_argument(
        "--include", type=Path, help="include directory that holds oneapi/dnnl (default: newest installed)"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    include = options.include
    if include is None:
        found = installed_headers()
        if not found:
            raise SystemExit("no oneDNN headers found: install onednn-devel-cpu-gomp or torch, or pass --include")
        include = found[-1][1]
    abi = read_abi(include)
    options.output.write_text(render(abi))
    print(f"{options.output}: oneDNN {'.'.join(map(str, abi.version))}, {len(abi.functions)} functions")


if __name__ == "__main__":
    main()
