"""Each private name of PyTorch's that the code uses is there: a new PyTorch without one fails here, by its name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import fmtprop

ROOT = Path(fmtprop.__file__).parent

#: the only files with private names, one for each door; what several rooms need is in that of `ops`
FILES = [f"{room}/pytorch.py" for room in ("archive", "capture", "dynamo", "lens", "ops", "training")]


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return the full name that an expression such as ``torch._C.x`` has, by the file's imports."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, names)):
        return f"{owner}.{node.attr}"
    return None


def torchs(tree: ast.AST) -> Iterator[str]:
    """Yield the full names of PyTorch's that a file imports or mentions."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name
                first = name.name.partition(".")[0]
                names[name.asname or first] = name.name if name.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                yield f"{node.module}.{name.name}"
                names[name.asname or name.name] = f"{node.module}.{name.name}"
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {node.value for node in attributes}
    yield from filter(None, (dotted(node, names) for node in attributes if node not in inner))


def is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.endswith("__") for part in parts)


@cache
def users_of_names() -> dict[str, list[str]]:
    users = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for name in sorted(set(filter(is_private, torchs(ast.parse(path.read_text(encoding="utf-8")))))):
            users[name].append(path.relative_to(ROOT).as_posix())
    return dict(users)


def look_up(name: str) -> Any:
    first, *rest = name.split(".")
    value: Any = import_module(first)
    path = first
    for part in rest:
        path = f"{path}.{part}"
        try:
            value = getattr(value, part)
        except AttributeError:
            value = import_module(path)
    return value


@pytest.mark.parametrize("name", sorted(users_of_names()))
def test_this_pytorch_has_a_private_name(name: str) -> None:
    try:
        look_up(name)
    except (AttributeError, ImportError) as error:
        pytest.fail(
            f"PyTorch {torch.__version__} has no {name}, which {', '.join(users_of_names()[name])} uses: {error}"
        )


def test_no_other_file_has_private_names() -> None:
    files = {file for users in users_of_names().values() for file in users}
    assert sorted(files) == FILES, "a room's private names of PyTorch are in its file pytorch.py alone"


def test_each_name_of_these_files_is_used() -> None:
    imported = {
        (node.module, name.name)
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    for file in FILES:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        module = f"fmtprop.{file.removesuffix('.py').replace('/', '.')}"
        assert [one for one in offered(tree) if one not in read and (module, one) not in imported] == [], file


def offered(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines or passes on."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield from (name.asname or name.name for name in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_a_name_that_is_missing_fails():
    assert "torch._dynamo" in {name[:13] for name in users_of_names()}
    tree = ast.parse("import torch\nfrom torch._x import y as z\ntorch.a._b.c(1)\nz.w\ntorch.relu")
    assert set(filter(is_private, torchs(tree))) == {"torch._x.y", "torch.a._b.c", "torch._x.y.w"}
    with pytest.raises(ImportError):
        look_up("torch._no_such_module.name")
