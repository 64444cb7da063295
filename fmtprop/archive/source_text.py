"""Grammars of strings in the Python source that PyTorch writes for a program.

``torch.fx`` writes a program as Python source and executes it. It inserts names of values unchanged, and names of
parameters and keys of inputs between quotes, without escapes. A string that is more than a name would be executed: the
input name ``x=print()`` is an argument with a default; the parameter name ``a") or print("`` ends the quotes. This
module owns the grammar of each kind of inserted string. Must not know where a string comes from.

References
----------
``torch/fx/graph.py``: ``_format_target``, ``_format_args``, ``_PyTreeCodeGen``; ``torch/export/_unlift.py``:
``_convert_guards_code_to_fn``.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from typing import Any

from fmtprop.errors import ImportModelError

# Atoms may be any key of a ModuleDict, such as "a-b" or "3x3 conv". Atoms that begin with two underscores are refused:
# they lead to Python's own attributes of objects and classes.
_ATOM = r"(?!__)[\w /:+@#,=~|<>!?*&%^$-]*"
_PATH = re.compile(rf"{_ATOM}(\.{_ATOM})*")
_TEXT = re.compile(r"""[^"'\\]*""")


def is_name(text: str) -> bool:
    """Return whether a string can name a value, an argument or a keyword.

    >>> is_name("conv2d_1"), is_name("größe"), is_name("x=print()")
    (True, True, False)
    """
    return text == "" or text.isidentifier()


def is_path(text: str) -> bool:
    """Return whether a string can be the path of a parameter, a buffer or a module: atoms separated by dots.

    >>> is_path("layer1.0.a-b.weight"), is_path('a") or print("'), is_path("__class__.forward")
    (True, False, False)
    """
    return text.isprintable() and _PATH.fullmatch(text) is not None


def is_text(text: str) -> bool:
    """Return whether a string cannot end quotes of either kind.

    >>> is_text("pixel values (rgb)"), is_text("don't")
    (True, False)
    """
    return text.isprintable() and _TEXT.fullmatch(text) is not None


def check_parameter(path: str) -> None:
    """Refuse a parameter or buffer with a name that torch cannot write.

    A model in this process is the caller's own code, so this check is weaker than :func:`is_path`: the source must be
    valid.
    """
    for atom in path.split("."):
        if keyword.iskeyword(atom) or not is_text(atom.replace("'", "")):
            raise ImportModelError(
                f"{path!r} cannot be imported: torch writes names of parameters, buffers and modules into Python "
                f"source, but {atom!r} is not valid there (a keyword, double quotes, a backslash or control "
                "characters); rename it"
            )


def check_keywords(names: Iterable[Any]) -> None:
    """Refuse keyword arguments that torch cannot write.

    `names`: names of the keyword arguments of ``forward``.
    """
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()) or keyword.iskeyword(name):
            raise ImportModelError(
                f"the keyword argument {name!r} is not a Python identifier, which torch.export needs; rename it, or "
                "give it in a dict"
            )
