"""The graphs that ship with the package: their names and files.

They are in the checkout's top-level ``graphs`` folder or, in an installed package, in ``fmtprop/graphs``.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from fmtprop.errors import GraphError

_PACKAGE = Path(__file__).resolve().parents[1]
#: folders to search, in this order
FOLDERS = (_PACKAGE / "graphs", _PACKAGE.parent / "graphs")


def builtin_names() -> list[str]:
    """Return the names of the built-in graphs, sorted.

    Examples
    --------
    >>> builtin_names() == sorted(builtin_names())
    True
    """
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.json")})


def builtin_path(name: str) -> Path:
    """Return the file of a built-in graph.

    Parameters
    ----------
    name : str
        Such as ``"resnet50"``.

    Raises
    ------
    GraphError
        There is no graph with this name; the message has the nearest names.
    """
    names = builtin_names()
    if name in names:  # a name, never a path: only listed names are searched
        return next(path for folder in FOLDERS if (path := folder / f"{name}.json").is_file())
    close = difflib.get_close_matches(name, names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names) or 'none'}"
    raise GraphError(f"no built-in graph is named {name!r}; {hint}")
