"""Options of a compilation: every choice of the caller, checked before the compilation begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fmtprop.errors import OptionError, ShapeError
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.passes.assignment.policies import POLICIES
from fmtprop.passes.precision.compress_weights import BITS
from fmtprop.targets.registry import provider, target_names
from fmtprop.tuning import NOMINAL, TUNES

#: the policy that is solved over the whole graph
OPTIMAL = "optimal"

DEFAULT_POLICY = OPTIMAL

_KNOWN: Mapping[str, tuple[str | None, ...]] = {
    "dtype": ("f32", "bf16", "f16"),
    "embeddings": (None, *BITS),
    "memory": ("save", "recompute"),
    "policy": (OPTIMAL, *reversed(list(POLICIES))),
    "replan": ("background", "now", "never"),
    "special_values": ("fast", "kept", "exact"),
    "verify": ("off", "on", "full"),
    "weights": (None, *BITS),
}

#: value of `tune`: the first plan is made quickly, and the plan of ``"auto"`` in the background
LAZY = "lazy"

#: default of special_values in training, which must show a loss that became NaN
KEPT = "kept"

_EFFORTS = ("quick", "patient")

#: fields of other types
_BOOLEANS, _MAPPINGS = ("confirm", "winograd", "deterministic"), ("boundary", "pin")


@dataclass(frozen=True)
class Tune:
    """Source of costs, and effort: the long form of the parameter `tune` of :func:`fmtprop.compile`.

    Parameters
    ----------
    costs : {"auto", "model", "measure", "remeasure"}
        Source of the costs of policy ``"optimal"``, as the short form names it.
    effort : {"quick", "patient"}, optional
        Time for comparing plans: ``"patient"`` runs every plan that may be the fastest, for a second; ``"quick"`` runs
        only plans with unclear costs, for a fifth of that. Default: patient if costs are measured.

    Raises
    ------
    OptionError
        A value is unknown.

    Examples
    --------
    >>> Tune("measure").is_patient, Tune("model", effort="patient").measures
    (True, False)
    """

    costs: str = "auto"
    effort: str | None = None

    def __post_init__(self) -> None:
        _check_known("costs", self.costs, TUNES, "Tune")
        if self.effort is not None:
            _check_known("effort", self.effort, _EFFORTS, "Tune")

    @property
    def measures(self) -> bool:
        """Whether costs are measured."""
        return self.costs in ("measure", "remeasure")

    @property
    def is_patient(self) -> bool:
        """Whether compiling may take long."""
        return self.measures if self.effort is None else self.effort == "patient"


@dataclass(frozen=True)
class Options:
    """Options of a compilation; every field is a parameter of :func:`fmtprop.compile`."""

    #: see :func:`fmtprop.compile`; kept as its short name
    dtype: str = "f32"
    policy: str = DEFAULT_POLICY
    target: str = "onednn"
    tune: str | Tune = "auto"
    verify: str = "on"
    boundary: Mapping[str, MemoryDesc] = field(default_factory=dict)
    pin: Mapping[str, MemoryDesc | str] = field(default_factory=dict)
    tune_budget: float | None = None
    confirm: bool = True
    winograd: bool = True
    special_values: str = "fast"
    memory: str = "save"
    deterministic: bool = False
    weights: str | None = None
    embeddings: str | None = None
    keep_float: Sequence[str] = ()
    replan: str = "now"
    #: called with steps done and steps in all while costs are measured; ignored in comparisons
    progress: Callable[[int, int], None] | None = field(default=None, compare=False, repr=False)
    #: called with the name of each stage that begins; ignored in comparisons
    stage: Callable[[str], None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        given = self.dtype
        object.__setattr__(self, "dtype", _short_name(given))
        if self.dtype not in _KNOWN["dtype"]:
            raise _wrong("dtype", f"be one of {', '.join(map(repr, _KNOWN['dtype']))}", given)
        for name, values in {**_KNOWN, "target": target_names()}.items():
            _check_known(name, getattr(self, name), values)
        if not isinstance(self.tune, Tune):
            _check_known("tune", self.tune, (*TUNES, LAZY))
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "be True or False", getattr(self, name))
        for name in _MAPPINGS:
            formats = getattr(self, name)
            if not isinstance(formats, Mapping) or not all(isinstance(key, str) for key in formats):
                raise _wrong(name, "map names to formats", formats)
            object.__setattr__(self, name, dict(formats))  # the caller may change its own
        if isinstance(self.keep_float, str) or not all(isinstance(name, str) for name in self.keep_float):
            raise _wrong("keep_float", "be a list of names of nodes", self.keep_float)
        object.__setattr__(self, "keep_float", tuple(self.keep_float))
        if self.progress is not None and not callable(self.progress):
            raise _wrong("progress", "be callable with two numbers", self.progress)
        for name, desc in self.boundary.items():
            if not isinstance(desc, MemoryDesc):
                raise OptionError(f"boundary[{name!r}] must be a MemoryDesc, got {type(desc).__name__}")
        if self.pin and self.policy != OPTIMAL:
            raise OptionError(f"pin needs policy='optimal': the {self.policy!r} policy takes no constraints")
        if self.codes and self.verify == "full":
            raise OptionError(f"verify='full' compares with the model's own weights: with {self.codes}, use 'on'")
        if self.special_values != "fast" and not provider(self.target).has_exact:
            raise OptionError(f"special_values={self.special_values!r} needs target='onednn'")
        if self.deterministic and self.tuning.measures:
            raise OptionError(
                f"deterministic=True chooses by modelled costs alone: leave out tune={self.tuning.costs!r}"
            )
        if self.tune_budget is not None and not _is_positive(self.tune_budget):
            raise OptionError(f"tune_budget must be a number of seconds above 0, got {self.tune_budget!r}")

    @property
    def codes(self) -> str:
        """The options by which a plan computes with other numbers than the model has; empty without any."""
        given = {"weights": self.weights, "embeddings": self.embeddings}
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)

    @property
    def plans_all(self) -> bool:
        """Whether each shape gets a plan at its first call: PyTorch would compute with other numbers."""
        return bool(self.codes) or self.deterministic

    @property
    def recorded_costs(self) -> str:
        """The source of the same costs in a report, which times nothing for them."""
        if self.deterministic:
            return NOMINAL
        return "model" if self.tuning.costs == "model" else "auto"

    @property
    def races(self) -> bool:
        """Whether plans are run against each other, or against PyTorch's own steps."""
        return self.confirm and not self.deterministic

    @property
    def is_lazy(self) -> bool:
        """Whether the first plan is made quickly, and replaced later."""
        is_fixed = self.deterministic or self.pin or self.codes or self.keep_float
        return self.tune == LAZY and self.policy == OPTIMAL and not is_fixed

    @property
    def flushes(self) -> bool:
        """Whether denormal numbers are zero in native steps."""
        return self.special_values != "exact"

    @property
    def tuning(self) -> Tune:
        """Source of costs, and effort."""
        if isinstance(self.tune, Tune):
            return self.tune
        return Tune() if self.tune == LAZY else Tune(self.tune)


def _check_known(name: str, value: object, values: tuple[str | None, ...], where: str = "compile") -> None:
    if value not in values:
        raise _wrong(name, f"be one of {', '.join(map(repr, values))}", value, where)


def _wrong(name: str, rule: str, value: object, where: str = "compile") -> OptionError:
    return OptionError(f"The {name!r} parameter of {where} must {rule}. Got {value!r} instead.")


def _short_name(dtype: object) -> object:
    """Return fmtprop's name of a data type of numpy or PyTorch; any other value as it is."""
    try:
        return DataType.from_any(dtype).value
    except ShapeError:
        return dtype


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
