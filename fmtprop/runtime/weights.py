"""Weights that plans share: equal bytes are in memory once, and a model's constants are known by their formats.

Owns these two tables. Neither keeps anything alive.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np
import torch

from fmtprop.errors import PlanError
from fmtprop.ir.node import Value
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc, unpack
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


class PackedForms:
    """The formats in which plans of one formatted graph have its constants: flat bytes, by origin and format.

    The origin of what a reorder made of constants is the reorder's source. Bytes go with the last plan that has them.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[Value, MemoryDesc], torch.Tensor] = WeakValueDictionary()

    def find(self, origin: Value, desc: MemoryDesc) -> torch.Tensor | None:
        """Return a constant in a format, None where no plan has it so."""
        return self._known.get((origin, desc))

    def note(self, origin: Value, desc: MemoryDesc, flat: torch.Tensor) -> None:
        """Take note of a constant in a format."""
        self._known[origin, desc] = flat

    def read(self, origin: Value) -> torch.Tensor:
        """Return a constant, dense and row-major, from any of its formats.

        Raises
        ------
        PlanError
            No plan has it in a format that can be read.
        """
        for (known, desc), flat in list(self._known.items()):
            if known == origin and desc.kind == "blocked":
                array = unpack(flat[: desc.nbytes].numpy(), desc)
                tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(desc.dims)
                return tensor.view(torch_dtype(desc.dtype))
        raise PlanError(f"constant {origin} is in no format that can be read back: compile the model again")
