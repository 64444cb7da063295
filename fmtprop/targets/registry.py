"""The targets that a model can be compiled for, by name: the only list of them.

One that a program does not name is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fmtprop.errors import UnsupportedOpError
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Setting
from fmtprop.targets.executable import Provider
from fmtprop.targets.onednn import OneDnnTarget
from fmtprop.targets.reference import ReferenceTarget


def _mkldnn() -> type[Provider]:
    from fmtprop.targets.mkldnn import MkldnnTarget

    return MkldnnTarget


_TARGETS: dict[str, Callable[[], type[Provider]]] = {"onednn": lambda: OneDnnTarget, "mkldnn": _mkldnn}


def register(made: type[Provider]) -> None:
    """Add a target: its name is a value of the ``target`` parameter of :func:`fmtprop.compile` from now on."""
    if (known := _TARGETS.setdefault(made.name, lambda: made)()) is not made:
        raise UnsupportedOpError(f"there is a target {made.name!r} already: {known.__qualname__}")


def target_names() -> tuple[str, ...]:
    """Return the names of all targets, the default first."""
    return tuple(_TARGETS)


def provider(name: str) -> type[Provider]:
    """Return the class of a target."""
    if name not in _TARGETS:
        raise UnsupportedOpError(f"there is no target {name!r}; known: {', '.join(_TARGETS)}")
    return _TARGETS[name]()


def setting_for(target: Provider, boundary: Mapping[str, MemoryDesc], fallback: Provider | None = None) -> Setting:
    """Return the setting of a graph that a target executes, with PyTorch's operators as the fallback."""
    formats = {name: target.at_boundary(desc) for name, desc in boundary.items()}
    how = target.in_place, target.competing, target.expanding, target.has_bytes
    return Setting(target, fallback or ReferenceTarget(), formats, *how)
