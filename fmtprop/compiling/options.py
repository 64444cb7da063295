"""Options of a compilation: every choice of the caller, checked before the compilation begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fmtprop.errors import UnsupportedOpError
from fmtprop.layout import MemoryDesc
from fmtprop.passes.policies import POLICIES
from fmtprop.targets.registry import provider, target_names

__all__ = ["DEFAULT_POLICY", "OPTIMAL", "Options"]

#: the policy that is solved over the whole graph
OPTIMAL = "optimal"

DEFAULT_POLICY = OPTIMAL

_KNOWN: Mapping[str, tuple[str, ...]] = {
    "dtype": ("f32", "bf16"),
    "memory": ("save", "recompute"),
    "policy": (OPTIMAL, *reversed(list(POLICIES))),
    "special_values": ("fast", "exact"),
    "tune": ("auto", "model", "measure", "remeasure"),
    "verify": ("off", "on", "full"),
}

_EFFORTS = ("quick", "patient")


@dataclass(frozen=True)
class Options:
    """Options of a compilation; every field is a parameter of :func:`fmtprop.compile`.

    Parameters
    ----------
    dtype, policy, target, tune, verify, special_values, memory : str
        See :func:`fmtprop.compile`.
    costs : {"auto", "model", "measure", "remeasure"}, optional
        Where costs come from, if `tune` is not to say it.
    effort : {"quick", "patient"}, optional
        How long compiling may take, if `tune` is not to say it: ``"patient"`` runs every plan that may be the fastest,
        for a second; ``"quick"`` some of them, for a fifth of that.
    boundary, pin : mapping
        See :func:`fmtprop.compile`.
    tune_budget : float, optional
    confirm, winograd : bool
        See :func:`fmtprop.compile`.
    progress : callable, optional
        Called with steps done and steps in all while costs are measured; ignored in comparisons.
    stage : callable, optional
        Called with the name of each stage that begins; ignored in comparisons.
    """

    dtype: str = "f32"
    policy: str = DEFAULT_POLICY
    target: str = "onednn"
    tune: str = "auto"
    verify: str = "on"
    boundary: Mapping[str, MemoryDesc] = field(default_factory=dict)
    pin: Mapping[str, MemoryDesc | str] = field(default_factory=dict)
    tune_budget: float | None = None
    confirm: bool = True
    winograd: bool = True
    special_values: str = "fast"
    memory: str = "save"
    progress: Callable[[int, int], None] | None = field(default=None, compare=False, repr=False)
    stage: Callable[[str], None] | None = field(default=None, compare=False, repr=False)
    costs: str | None = None
    effort: str | None = None

    def __post_init__(self) -> None:
        for name, values in {**_KNOWN, "target": target_names()}.items():
            value = getattr(self, name)
            if value not in values:
                listed = ", ".join(repr(v) for v in values)
                raise UnsupportedOpError(
                    f"The {name!r} parameter of compile must be one of {listed}. Got {value!r} instead."
                )
        for name, values in (("costs", _KNOWN["tune"]), ("effort", _EFFORTS)):
            if getattr(self, name) not in (None, *values):
                listed = ", ".join(map(repr, values))
                raise UnsupportedOpError(
                    f"Options.{name} must be one of {listed}. Got {getattr(self, name)!r} instead."
                )
        for name in ("confirm", "winograd"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedOpError(
                    f"The {name!r} parameter of compile must be True or False. Got {getattr(self, name)!r} instead."
                )
        for name in ("boundary", "pin"):
            formats = getattr(self, name)
            if not isinstance(formats, Mapping) or not all(isinstance(key, str) for key in formats):
                raise UnsupportedOpError(
                    f"The {name!r} parameter of compile must map names to formats. Got {formats!r} instead."
                )
        if self.progress is not None and not callable(self.progress):
            raise UnsupportedOpError(
                f"The 'progress' parameter of compile must be callable with two numbers. Got {self.progress!r} instead."
            )
        for name, desc in self.boundary.items():
            if not isinstance(desc, MemoryDesc):
                raise UnsupportedOpError(f"boundary[{name!r}] must be a MemoryDesc, got {type(desc).__name__}")
        if self.pin and self.policy != OPTIMAL:
            raise UnsupportedOpError(f"pin needs policy='optimal': the {self.policy!r} policy takes no constraints")
        if self.special_values == "exact" and not provider(self.target).has_exact:
            raise UnsupportedOpError("special_values='exact' needs target='onednn'")
        if self.tune_budget is not None and not _is_positive(self.tune_budget):
            raise UnsupportedOpError(f"tune_budget must be a number of seconds above 0, got {self.tune_budget!r}")

    @property
    def costs_from(self) -> str:
        """Where costs come from; `tune` is a short form of this and of the effort."""
        return self.costs or self.tune

    @property
    def measures(self) -> bool:
        """Whether costs are measured."""
        return self.costs_from in ("measure", "remeasure")

    @property
    def is_patient(self) -> bool:
        """Whether compiling may take long: as long as measuring does, where nothing else was said."""
        return self.effort == "patient" if self.effort is not None else self.tune in ("measure", "remeasure")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
