"""Names that code must not spell: of targets where steps run and are timed, of ops in tables outside `fmtprop/ops/`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

import fmtprop
from fmtprop.ops import OPS

ROOMS = [Path(fmtprop.__file__).parent / room for room in ("runtime", "tuning")]
FILES = [path for room in ROOMS for path in sorted(room.rglob("*.py"))]

#: names of targets, and the constants that hold some
NAMES = frozenset({"onednn", "mkldnn", "reference", "jit"})
CONSTANTS = frozenset({"JIT", "REFERENCE"})

#: types of handles, of which an implementation's attributes tell what matters
HANDLES = frozenset(
    {"PrimitiveDesc", "Primitive", "Kernel", "StandaloneKernel", "TorchFunction", "Implementation", "Executable"}
)

#: lines with a target's name that means something else: how names of oneDNN's implementations begin
ALLOWED = {("efficiency.py", "jit"), ("roofline.py", "jit")}


def found(path: Path) -> list[str]:
    """Return where a file names a target, or tells handles apart by their types."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        named = ""
        if isinstance(node, ast.Constant) and node.value in NAMES and (path.name, node.value) not in ALLOWED:
            named = repr(node.value)
        elif isinstance(node, ast.Name) and node.id in CONSTANTS:
            named = node.id
        elif types_told_apart(node) & HANDLES or asks_a_handle_for_its_type(node):
            named = ast.unparse(node)
        if named:
            lines.append(f"{path.name}:{node.lineno}: {named}")
    return lines


def types_told_apart(node: ast.AST) -> set[str]:
    """Return the types that a call of isinstance, a comparison of types or a pattern names."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
        return identifiers(node.args[1])
    if isinstance(node, ast.Compare) and any("type" in identifiers(side) for side in (node.left, *node.comparators)):
        return {name for side in (node.left, *node.comparators) for name in identifiers(side)}
    return identifiers(node.cls) if isinstance(node, ast.MatchClass) else set()


def asks_a_handle_for_its_type(node: ast.AST) -> bool:
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Name)
        or node.func.id not in ("isinstance", "type")
    ):
        return False
    return isinstance(node.args[0], ast.Attribute) and node.args[0].attr in ("handle", "executable")


def identifiers(node: ast.AST) -> set[str]:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def compared_targets(path: Path) -> list[str]:
    """Return where a file compares something with a target's name: a property of targets is an attribute of them."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            parts: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            parts = [case.pattern for case in node.cases]
        else:
            continue
        constants = [one for part in parts for one in ast.walk(part) if isinstance(one, ast.Constant)]
        lines += [f"{path.name}:{node.lineno}: {one.value!r}" for one in constants if one.value in NAMES]
    return lines


def test_no_rule_depends_on_the_name_of_a_target() -> None:
    package = Path(fmtprop.__file__).parent
    # `compile` itself replaces a target without a library
    allowed = {*package.glob("targets/**/*.py"), package / "api.py", package / "compiling/from_graph.py"}
    others = set(package.rglob("*.py")) - allowed
    assert len(others) > 300
    assert [line for path in sorted(others) for line in compared_targets(path)] == []


def test_no_target_is_named_and_no_handle_is_told_by_its_type() -> None:
    assert [line for path in FILES for line in found(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        "x = step.target == 'onednn'",
        "x = step.target in ('onednn', 'jit')",
        "match step.target:\n    case 'onednn' | 'jit':\n        pass",
    ],
)
def test_the_search_finds_names_of_targets(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it.py"
    path.write_text(text)
    assert compared_targets(path) and found(path)


@pytest.mark.parametrize(
    "text",
    [
        "x = isinstance(way, Kernel)",
        "x = isinstance(way, (int, dnnl.Primitive))",
        "x = isinstance(node.choice.handle, Anything)",
        "x = type(way) is TorchFunction",
        "x = type(step.executable) in known",
        "match way:\n    case PrimitiveDesc():\n        pass",
        "x = step.target is JIT",
        "x = {'mkldnn': 1}",
        "x = step.target.startswith('mkldnn')",
    ],
)
def test_the_search_finds_types_of_handles_and_any_mention_of_a_target(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it.py"
    path.write_text(text)
    assert found(path)


# ---------------------------------------------------------------- tables of ops

PACKAGE = Path(fmtprop.__file__).parent

#: rooms that may list ops: where these are declared; importers; oneDNN's kinds of primitives, which are no ops
LISTING = frozenset({"ops", "capture", "archive", "onnx", "dnnl"})

OUTSIDE = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in LISTING]


def tables(path: Path) -> list[str]:
    """Return where a file tells ops apart by two names or more: in a literal, a match, a chain of comparisons.

    A property of an op is a field of its declaration, so that a new op is one file. One name is a rewrite's pattern.
    """
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = names_in(node)
        if len(names) > 1:
            lines.append(f"{path.relative_to(path.parents[1])}:{node.lineno}: {', '.join(sorted(names))}")
    return lines


def names_in(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Set | ast.Tuple | ast.List):
        return of_ops(node.elts)
    if isinstance(node, ast.Dict):
        return of_ops(node.keys) | of_ops(node.values)
    if isinstance(node, ast.Match):
        return of_ops(inner for case in node.cases for inner in ast.walk(case.pattern))
    if isinstance(node, ast.BoolOp):
        return {name for value in node.values for name in compared(value)}
    if isinstance(node, ast.If):
        chain = [node]
        while len(chain[-1].orelse) == 1 and isinstance(chain[-1].orelse[0], ast.If):
            chain.append(chain[-1].orelse[0])
        return {name for one in chain for name in compared(one.test)}
    return set()


def compared(node: ast.expr) -> set[str]:
    comparisons = [one for one in ast.walk(node) if isinstance(one, ast.Compare)]
    return {name for one in comparisons for name in of_ops([one.left, *one.comparators])}


def of_ops(nodes: Iterable[ast.AST | None]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant)} & {declaration.name for declaration in OPS}


def test_no_table_of_ops_stands_outside_their_declarations() -> None:
    assert [line for path in OUTSIDE for line in tables(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        "x = frozenset({'convolution', 'matmul'})",
        "x = {'softmax': 1, 'lrn': 2}",
        "x = {a: 'softmax', b: 'lrn'}",
        "x = node.op in ('binary', 'sum')",
        "x = node.op == 'binary' or node.op == 'sum'",
        "if op == 'binary':\n    pass\nelif op == 'sum':\n    pass",
        "match op:\n    case 'binary' | 'sum':\n        pass",
    ],
)
def test_the_search_finds_tables(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it.py"
    path.write_text(text)
    assert tables(path)


def test_one_name_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "it.py"
    path.write_text("x = node.op == 'binary' and {'sum'} and ('relu', 'concat')")
    assert tables(path) == []
