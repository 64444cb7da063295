"""Weights that plans share: equal bytes are in memory once.

Owns the table of known bytes. Must not know formats: plans that pack a constant in the same format get equal bytes.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from fmtprop.system.locks import ProcessLock
from fmtprop.targets.memory import ALIGNMENT

#: bytes of a sample, which is compared before all bytes are
_SAMPLE_NBYTES = 256


class WeightStore:
    """Flat bytes, stored once for all plans that use them, whatever their shapes, numbers of threads and models.

    The store keeps nothing alive: bytes are freed with the last plan that holds them.

    Examples
    --------
    >>> store = WeightStore()
    >>> first = store.share(torch.ones(8, dtype=torch.uint8))
    >>> store.share(torch.ones(8, dtype=torch.uint8)) is first
    True
    """

    def __init__(self) -> None:
        #: size, alignment and some bytes -> bytes
        self._known: WeakValueDictionary[tuple[int, bool, bytes], torch.Tensor] = WeakValueDictionary()
        self._lock = ProcessLock()

    def share(self, flat: torch.Tensor) -> torch.Tensor:
        """Return known bytes that are equal to these, else these.

        Parameters
        ----------
        flat : torch.Tensor
            Flat bytes that nobody changes any more; an opaque tensor of PyTorch is not compared.
        """
        if flat.layout is not torch.strided or flat.dtype is not torch.uint8 or flat.dim() != 1:
            return flat
        sample = flat[:: max(1, flat.numel() // _SAMPLE_NBYTES)].numpy().tobytes()
        with self._lock.current:
            known = self._known.setdefault((flat.numel(), flat.data_ptr() % ALIGNMENT == 0, sample), flat)
            return known if known is flat or torch.equal(known, flat) else flat


#: the store of this process
WEIGHTS = WeightStore()
