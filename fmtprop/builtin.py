"""The graphs that ship with the package: their names and files.

They are in the checkout's top-level ``graphs`` folder or, in an installed package, in ``fmtprop/graphs``.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from fmtprop.errors import GraphError

_PACKAGE = Path(__file__).resolve().parent
#: folders to search, in this order
FOLDERS = (_PACKAGE / "graphs", _PACKAGE.parent / "graphs")


def builtin_names() -> list[str]:
    """Return the names of the built-in graphs, sorted.

    >>> builtin_names() == sorted(builtin_names())
    True
    """
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.json")})


def builtin_path(name: str) -> Path:
    """Return the file of a built-in graph.

    `name`: such as ``"resnet50"``.
    """
    names = builtin_names()
    if name in names:  # a name, never a path: only listed names are searched
        return next(path for folder in FOLDERS if (path := folder / f"{name}.json").is_file())
    close = difflib.get_close_matches(name, names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names) or 'none'}"
    raise GraphError(f"no built-in graph is named {name!r}; {hint}")


def catalogue() -> list[dict[str, Any]]:
    """Return what is in each built-in graph, read from its document alone: neither graphs nor PyTorch are needed.

    Result: ``name``, ``inputs`` (type by name), ``parameters`` (their number) and ``ops`` (number of nodes by op, the
    most frequent first).

    >>> next(row for row in catalogue() if row["name"] == "chain")["inputs"]
    {'input': 'f32[1,3,32,32]'}
    """
    documents = (json.loads(builtin_path(name).read_text(encoding="utf-8")) for name in builtin_names())
    return [_entry(document) for document in documents]


def _entry(document: dict[str, Any]) -> dict[str, Any]:
    nodes = document["nodes"]
    inputs = {row["name"]: row["results"][0] for row in nodes if row["op"] == "input"}
    ops = Counter(
        ".".join(row.get("attrs", {}).get("target", "").split(".")[:2])
        or (row["attrs"]["alg"] if row["op"] == "eltwise" else row["op"])
        for row in nodes
        if row["op"] not in ("input", "output", "constant")
    )
    return {
        "name": document["name"],
        "inputs": {name: f"{one['dtype']}[{','.join(map(str, one['dims']))}]" for name, one in inputs.items()},
        "parameters": sum(prod(row["results"][0]["dims"]) for row in nodes if row["op"] == "constant"),
        "ops": dict(ops.most_common()),
    }
