"""Which costs a compilation uses: modelled, measured, or what the cache knows and the model elsewhere."""

from __future__ import annotations

from fmtprop.errors import FmtpropError
from fmtprop.passes.target import Costs
from fmtprop.tuning.cache import TuningCache
from fmtprop.tuning.peaks import peaks
from fmtprop.tuning.roofline import ModelCosts

#: where costs may come from
TUNES = ("model",)


def costs_for(tune: str, *, weights_nbytes: int, cache: TuningCache | None = None) -> Costs:
    """Return the costs that a compilation is to use.

    Parameters
    ----------
    tune : {"model"}
        Where they come from.
    weights_nbytes : int
        Bytes of all weights of the network.
    cache : TuningCache, optional
        What was measured before; by default the user's.

    Returns
    -------
    Costs

    Raises
    ------
    FmtpropError
        There is no such way.
    """
    if tune not in TUNES:
        raise FmtpropError(f"unknown tune {tune!r}; known: {', '.join(TUNES)}")
    return ModelCosts(peaks(cache if cache is not None else TuningCache()), weights_nbytes)
