"""Every public name is documented in numpydoc form: what it takes, what it gives.

Ruff checks that docstrings exist and how their sections are written. It does not check that the sections agree
with the signature; this does, for everything that ``fmtprop.__all__`` offers. There is no list of exceptions. Functions
and classes have all sections; a method may say it in prose, but a Parameters section is complete.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import fmtprop

SECTIONS = "Parameters|Attributes|Returns|Yields|Raises|Warns|See Also|Notes|References|Examples"
UNDERLINED = re.compile(rf"^({SECTIONS})\n-+$", re.MULTILINE)
# `name : type`, `a, b : type`, `*args`, at the margin of its section.
PARAMETER = re.compile(r"^(\*{0,2}\w+(?:, *\*{0,2}\w+)*)(?: *:.*)?$", re.MULTILINE)


def sections_of(doc: str) -> dict[str, str]:
    parts = UNDERLINED.split(doc)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented(section: str) -> set[str]:
    names = ",".join(PARAMETER.findall(section)).split(",")
    return {name.strip().lstrip("*") for name in names if name.strip()}


def complaints(name: str, doc: str | None, parameters: set[str], returns: bool) -> list[str]:
    """Say what is wrong with one docstring."""
    if not doc:
        return [f"{name}: has no docstring"]
    found = []
    if not doc.split("\n\n")[0].rstrip().endswith("."):
        found.append(f"{name}: the summary must end with a full stop")
    sections = sections_of(doc)
    told = documented(sections.get("Parameters", "")) | documented(sections.get("Attributes", ""))
    if missing := parameters - told:
        found.append(f"{name}: Parameters does not name {', '.join(sorted(missing))}")
    if unknown := documented(sections.get("Parameters", "")) - parameters:
        found.append(f"{name}: Parameters names {', '.join(sorted(unknown))}, which the signature has not")
    if returns and not {"Returns", "Yields"} & sections.keys():
        found.append(f"{name}: has no Returns section")
    return found


def parameters_of(function: Any) -> set[str]:
    return {name for name in inspect.signature(function).parameters if name not in ("self", "cls")}


def gives_something(function: Any) -> bool:
    return inspect.signature(function).return_annotation not in (None, "None", "NoReturn", "Never")


def check_function(name: str, function: Any) -> list[str]:
    return complaints(name, inspect.getdoc(function), parameters_of(function), gives_something(function))


def check_method(name: str, function: Any) -> list[str]:
    doc = inspect.getdoc(function)
    listed = "Parameters" in sections_of(doc or "")
    return complaints(name, doc, parameters_of(function) if listed else set(), returns=False)


def check_class(name: str, cls: type) -> list[str]:
    if issubclass(cls, enum.Enum):
        taken: set[str] = set()
    elif dataclasses.is_dataclass(cls):
        taken = {field.name for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")}
    else:
        taken = parameters_of(cls.__init__) if "__init__" in vars(cls) else set()
    found = complaints(name, cls.__doc__ and inspect.cleandoc(cls.__doc__), taken, returns=False)
    for key, member in vars(cls).items():
        if key.startswith("_"):
            continue
        if isinstance(member, property):
            found += complaints(f"{name}.{key}", inspect.getdoc(member), set(), returns=False)
        elif isinstance(member, (staticmethod, classmethod)):
            found += check_method(f"{name}.{key}", member.__func__)
        elif inspect.isfunction(member):
            found += check_method(f"{name}.{key}", member)
    return found


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for key in module.__all__:
        value = getattr(module, key)
        if inspect.ismodule(value):
            yield value.__name__, value
            yield from public(value)
        elif callable(value):
            yield f"{module.__name__}.{key}", value


@pytest.mark.parametrize("name", sorted(fmtprop.__all__))
def test_public_name_is_documented(name: str) -> None:
    value = getattr(fmtprop, name)
    members = [(f"fmtprop.{name}", value)]
    if inspect.ismodule(value):
        assert value.__doc__, f"{name}: the module has no docstring"
        members = list(public(value))
        assert members, f"{name}: the module offers nothing"
    found = []
    for label, member in members:
        if inspect.isclass(member):
            found += check_class(label, member)
        elif callable(member):
            found += check_function(label, member)
    assert not found, "\n" + "\n".join(found)


def good(a: int, *rest: int) -> int:
    """Add.

    Parameters
    ----------
    a, *rest : int
        Summands.

    Returns
    -------
    int
        The sum.
    """
    return a + sum(rest)


def bad(a: int, b: int) -> int:
    """Add

    Parameters
    ----------
    c : int
        A summand.
    """
    return a + b


class Half:
    """A class."""

    def prose(self, value: int, other: int) -> int:
        """Return the sum."""
        return value + other

    def half(self, value: int, other: int) -> int:
        """Return the sum.

        Parameters
        ----------
        value : int
            A summand.
        """
        return value + other


def test_the_check_accepts_a_complete_docstring() -> None:
    assert check_function("good", good) == []


def test_a_list_of_parameters_is_complete() -> None:
    assert check_class("Half", Half) == ["Half.half: Parameters does not name other"]


def test_the_check_finds_what_is_missing() -> None:
    assert check_function("bad", bad) == [
        "bad: the summary must end with a full stop",
        "bad: Parameters does not name a, b",
        "bad: Parameters names c, which the signature has not",
        "bad: has no Returns section",
    ]
