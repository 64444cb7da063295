"""Who runs steps and who times them know implementations, not targets: what they must not spell is looked for here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fmtprop

ROOMS = [Path(fmtprop.__file__).parent / room for room in ("runtime", "tuning")]
FILES = [path for room in ROOMS for path in sorted(room.glob("*.py"))]

#: names of targets, and the constants that hold some
NAMES = frozenset({"onednn", "mkldnn", "reference", "jit"})
CONSTANTS = frozenset({"JIT", "REFERENCE"})

#: types of handles, of which an implementation's attributes tell what matters
HANDLES = frozenset({"PrimitiveDesc", "Primitive", "Kernel", "StandaloneKernel", "Implementation", "Executable"})

#: lines with a target's name that means something else: how names of oneDNN's implementations begin
ALLOWED = {("roofline.py", "jit")}


def found(path: Path) -> list[str]:
    """Return what a file says of targets and of types of handles."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        what = ""
        if isinstance(node, ast.Constant) and node.value in NAMES and (path.name, node.value) not in ALLOWED:
            what = repr(node.value)
        elif isinstance(node, ast.Name) and node.id in CONSTANTS:
            what = node.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            object_, types = node.args
            named = {n.id for n in ast.walk(types) if isinstance(n, ast.Name)}
            named |= {n.attr for n in ast.walk(types) if isinstance(n, ast.Attribute)}
            asked = object_.attr if isinstance(object_, ast.Attribute) else ""
            what = ast.unparse(node) if named & HANDLES or asked in ("handle", "executable") else ""
        if what:
            lines.append(f"{path.name}:{node.lineno}: {what}")
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_target_is_named_and_no_handle_is_told_by_its_type(path: Path) -> None:
    assert found(path) == []


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "it.py"
    path.write_text("if step.target == 'onednn' or isinstance(choice.handle, Kernel) or x is JIT: pass\n")
    assert len(found(path)) == 3
