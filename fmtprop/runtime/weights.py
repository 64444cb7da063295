"""Weights that plans share: equal bytes are in memory once, and a model's constants are known by their formats.

Owns these two tables. Neither keeps anything alive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from fmtprop.errors import PlanError
from fmtprop.ir import Graph, TensorType, Value
from fmtprop.ir.deferred import SMALL_NBYTES, Deferred
from fmtprop.ir.tensors import Constant, data_type, row_major_bytes, torch_dtype
from fmtprop.layout import MemoryDesc, unpack
from fmtprop.layout.geometry import dense_strides
from fmtprop.system.locks import ProcessLock
from fmtprop.targets.memory import ALIGNMENT_NBYTES

#: bytes of a sample, which is compared before all bytes are
_SAMPLE_NBYTES = 256


class WeightStore:
    """Flat bytes, stored once for all plans that use them: for any shape, number of threads and model.

    The store keeps nothing alive: bytes are freed with the last plan that holds them.

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

        `flat`: flat bytes that do not change any more; an opaque tensor of PyTorch is not compared.
        """
        if flat.layout is not torch.strided or flat.dtype is not torch.uint8 or flat.dim() != 1:
            return flat
        sample = flat[:: max(1, flat.numel() // _SAMPLE_NBYTES)].numpy().tobytes()
        with self._lock.current:
            known = self._known.setdefault((flat.numel(), flat.data_ptr() % ALIGNMENT_NBYTES == 0, sample), flat)
            return known if known is flat or torch.equal(known, flat) else flat


#: identities of computed numbers that are kept: a network has a few for each weight
_MOST_COMPUTED = 1 << 14

#: the store of this process
WEIGHTS = WeightStore()


#: identity of a constant's numbers. Of a model's tensor, or of a part of it: address, version, dimensions, strides,
#: data type; of a function of one: this and the function; of any small tensor: a digest of its bytes
Numbers = Hashable


class InMemory(NamedTuple):
    """Identity of numbers in a model's tensor, or in a part of it."""

    address: int
    version: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Computed:
    """Identity of numbers that an op makes of others: a nested tuple would be hashed again and again."""


class SharedForms:
    """The formats in which plans for several shapes have a model's tensors: flat bytes, by the tensor and the format.

    So a plan for another shape neither packs weights again nor compares bytes. Bytes go with the last plan that has
    them.

    `tensors`: parameters and buffers of the model; they are kept alive, so that no other numbers get their place in
    memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._owners: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_inference():  # such a tensor does not count its changes
                self._owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._known: WeakValueDictionary[tuple[Numbers, MemoryDesc], torch.Tensor] = WeakValueDictionary()
        self._computed: dict[Hashable, Computed] = {}

    def computed(self, function: Hashable) -> Computed:
        """Return the identity of the result of an op on identified numbers."""
        if len(self._computed) > _MOST_COMPUTED:  # small constants differ from shape to shape
            self._computed = {}
        return self._computed.setdefault(function, Computed())

    def numbers(self, data: Constant) -> Numbers | None:
        """Return the key of a graph's constant, None where its numbers are large and not made of a model's tensor."""
        if isinstance(data, Deferred) and data.identity is not None:
            return data.identity
        if isinstance(data, Deferred) and data.source is not None:
            source, function = data.source
            numbers = self.numbers(source)
            return None if numbers is None else (numbers, function)
        if isinstance(data, Deferred) and not data.fresh:
            data = data.make()
        if not isinstance(data, torch.Tensor) or data.layout is not torch.strided or data.is_neg() or data.is_conj():
            return None
        owners = self._owners.get(data.untyped_storage().data_ptr())
        if owners is None:
            return _digest(data) if data.nbytes <= SMALL_NBYTES else None
        version = sum(owner._version for owner in owners)
        return InMemory(data.data_ptr(), version, tuple(data.shape), data.stride(), data.dtype)

    def find(self, numbers: Numbers, desc: MemoryDesc) -> torch.Tensor | None:
        """Return numbers in a format, None where no plan has them so."""
        return self._known.get((numbers, desc))

    def note(self, numbers: Numbers, desc: MemoryDesc, flat: torch.Tensor) -> None:
        """Take note of numbers in a format."""
        self._known[numbers, desc] = flat

    def parts(self, tensor: torch.Tensor) -> Iterator[tuple[MemoryDesc, MemoryDesc, torch.Tensor]]:
        """Yield the forms of a tensor of the model, or of its parts: where they lie in it, their format, the bytes."""
        own, dtype = self.numbers(tensor), data_type(tensor.dtype)
        for (numbers, desc), flat in list(self._known.items()):
            if not isinstance(own, InMemory) or not isinstance(numbers, InMemory) or desc.kind != "blocked":
                continue
            offset, rest = divmod(numbers.address - own.address, tensor.element_size())
            is_inside = not rest and 0 <= offset < tensor.numel() and numbers.version == own.version
            if is_inside and numbers.dtype is own.dtype and (desc.dims, desc.dtype) == (numbers.dims, dtype):
                yield MemoryDesc.view(desc.dims, dtype, strides=numbers.strides, offset0=offset), desc, flat


def _digest(data: torch.Tensor) -> Numbers:
    """Return an identity of a small tensor's numbers."""
    return blake2b(row_major_bytes(data).numpy().data, digest_size=16).digest(), tuple(data.shape), data.dtype


class PackedForms:
    """The formats in which plans of one formatted graph have its constants: flat bytes, by origin and format.

    The origin of a reordered constant is the reorder's source. Bytes go with the last plan that has them.
    """

    def __init__(self, shared: SharedForms | None = None) -> None:
        self._known: WeakValueDictionary[tuple[Value, MemoryDesc], torch.Tensor] = WeakValueDictionary()
        self._shared = shared
        #: forms that no plan reads, but from which others can be made
        self._kept: list[torch.Tensor] = []

    def numbers(self, data: Constant | None) -> Numbers | None:
        """Return the key under which plans of other graphs know a constant, None where they do not."""
        return self._shared.numbers(data) if self._shared is not None and data is not None else None

    def computed(self, function: Hashable) -> Numbers | None:
        """Return the key of the result of an op on numbers with keys, None without plans of other graphs."""
        return self._shared.computed(function) if self._shared is not None else None

    def find(self, origin: Value, desc: MemoryDesc, numbers: Numbers | None = None) -> torch.Tensor | None:
        """Return a constant in a format, None where no plan has it so."""
        found = self._known.get((origin, desc))
        if found is None and self._shared is not None and numbers is not None:
            return self._shared.find(numbers, desc)
        return found

    def packed(self, numbers: Numbers, desc: MemoryDesc) -> Deferred | None:
        """Return numbers that a plan of any graph has in a format that can be read; None where none has them so."""
        flat = self._shared.find(numbers, desc) if self._shared is not None and desc.kind == "blocked" else None
        if flat is None:
            return None
        type_, strides = TensorType(desc.dims, desc.dtype), dense_strides(desc.dims, range(desc.ndim))
        return Deferred(type_, strides, partial(dense, flat, desc), fresh=True, identity=numbers)

    def note(self, origin: Value, desc: MemoryDesc, flat: torch.Tensor, numbers: Numbers | None = None) -> None:
        """Take note of a constant in a format."""
        self._known[origin, desc] = flat
        if self._shared is not None and numbers is not None:
            self._shared.note(numbers, desc, flat)

    def keep(self, origin: Value, desc: MemoryDesc, flat: torch.Tensor) -> None:
        """Take note of a constant in a format, and keep it: its other formats cannot be read back."""
        self._kept.append(flat)
        self.note(origin, desc, flat)

    def is_kept(self, flat: torch.Tensor) -> bool:
        """Return whether a form is kept although no plan reads it."""
        return any(one is flat for one in self._kept)

    def items(self) -> list[tuple[Value, MemoryDesc, torch.Tensor]]:
        """Return the origin, the format and the bytes of every form."""
        return [(origin, desc, flat) for (origin, desc), flat in list(self._known.items())]

    def origins(self) -> set[Value]:
        """Return the constants that can be read."""
        return {origin for origin, desc in list(self._known) if desc.kind == "blocked"}

    def readers(self) -> dict[Value, Callable[[], torch.Tensor]]:
        """Return :meth:`reader` of every constant that can be read."""
        known = list(self._known.items())
        return {origin: partial(dense, flat, desc) for (origin, desc), flat in known if desc.kind == "blocked"}

    def reader(self, origin: Value) -> Callable[[], torch.Tensor]:
        """Return a function that returns a constant, dense and row-major, from any of its formats.

        The function keeps the packed form, so it may outlive the plans. Without a format that can be read, it raises
        PlanError.
        """
        for (known, desc), flat in list(self._known.items()):
            if known == origin and desc.kind == "blocked":
                return partial(dense, flat, desc)
        return partial(_refuse, origin)


def origin_of(graph: Graph, value: Value) -> Value:
    """Return the constant of which a value of a formatted graph is another format."""
    node = graph.node(value.node)
    while node.op == "reorder":
        source = graph.inputs(node.name)["src"]
        if graph.desc_of(source).dtype is not node.descs[0].dtype:
            break
        value, node = source, graph.node(source.node)
    return value


def dense(flat: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return the numbers of flat bytes in a blocked format, row-major."""
    array = unpack(flat[: desc.nbytes].numpy(), desc)
    tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(desc.dims)
    return tensor.view(torch_dtype(desc.dtype))


def _refuse(origin: Value) -> torch.Tensor:
    raise PlanError(f"constant {origin} is in no format that can be read back: compile the model again")
