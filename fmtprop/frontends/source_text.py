"""Which strings may stand in the Python source that PyTorch writes of a program.

``torch.fx`` makes a program runnable by writing Python and executing it. It pastes in names of values as they are, and
names of parameters and keys of inputs between quotes that it does not escape. A string that is more than a name would
be executed: ``x=print()`` for an input is an argument with a default, ``a") or print("`` for a parameter ends the
quotes. The grammars here hold what may be pasted where. They say nothing about where a string comes from.

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

# Atoms may be any key of a ModuleDict, such as "a-b" or "3x3 conv". Those with two underscores before them lead to what
# Python itself keeps in objects and classes.
_ATOM = r"(?!__)[\w /:+@#,=~|<>!?*&%^$-]*"
_PATH = re.compile(rf"{_ATOM}(\.{_ATOM})*")
_TEXT = re.compile(r"""[^"'\\]*""")


def is_name(text: str) -> bool:
    """Tell whether a string can name a value, an argument or a keyword.

    Parameters
    ----------
    text : str
        What stands in the source as it is; nothing at all is harmless.

    Examples
    --------
    >>> is_name("conv2d_1"), is_name("größe"), is_name("x=print()")
    (True, True, False)
    """
    return text == "" or text.isidentifier()


def is_path(text: str) -> bool:
    """Tell whether a string can lead to a parameter, a buffer or a module, by atoms with dots between them.

    Parameters
    ----------
    text : str
        What stands in the source as attributes, and between double quotes where an atom is no identifier.

    Examples
    --------
    >>> is_path("layer1.0.a-b.weight"), is_path('a") or print("'), is_path("__class__.forward")
    (True, False, False)
    """
    return text.isprintable() and _PATH.fullmatch(text) is not None


def is_text(text: str) -> bool:
    """Tell whether a string stays within quotes of either kind.

    Parameters
    ----------
    text : str
        A key of an input that is a dictionary, or an input that is a string.

    Examples
    --------
    >>> is_text("pixel values (rgb)"), is_text("don't")
    (True, False)
    """
    return text.isprintable() and _TEXT.fullmatch(text) is not None


def check_parameter(path: str) -> None:
    """Refuse a parameter or buffer whose name torch cannot write.

    A model in this process is the caller's own code, so this asks less than :func:`is_path`: the source must be valid.

    Parameters
    ----------
    path : str
        Qualified name in the module.

    Raises
    ------
    ImportModelError
        An atom of it is a keyword, or would end its quotes.
    """
    for atom in path.split("."):
        if keyword.iskeyword(atom) or not is_text(atom.replace("'", "")):
            raise ImportModelError(
                f"{path!r} cannot be imported: torch writes names of parameters, buffers and modules into Python "
                f"source, where {atom!r} cannot stand (a keyword, double quotes, a backslash or control characters); "
                "rename it"
            )


def check_keywords(names: Iterable[Any]) -> None:
    """Refuse keyword arguments that torch cannot write.

    Parameters
    ----------
    names : iterable of object
        Names of the keyword arguments of ``forward``.

    Raises
    ------
    ImportModelError
        One is no identifier, or a keyword.
    """
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()) or keyword.iskeyword(name):
            raise ImportModelError(
                f"the keyword argument {name!r} is not a Python identifier, which torch.export needs; rename it, or "
                "give it in a dict"
            )
