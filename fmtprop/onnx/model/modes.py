"""Modes in which PyTorch's calls pass through a function of ours: to record them, or to compute sizes only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from fmtprop.ops.pytorch import TorchDispatchMode
from fmtprop.ops.without_data import result_of, without_data


class CallMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that makes calls by :meth:`result`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch imports its compiler, to hide this mode from it

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.result(func, args, kwargs or {})

    @abstractmethod
    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, and return its result."""


class SizesOnly(CallMode):  # type: ignore[no-untyped-call]
    """A mode in which calls compute shapes and types only.

    `products`: number of products and sums of the calls that multiply matrices or convolve.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        self.products, self._counts = 0, flop_registry

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call on tensors without data."""
        if func is torch.ops.aten.detach.default:
            return func(*args, **kwargs)  # also a part of numpy(), which would read memory that is not there
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs = kwargs | {"device": torch.device("meta")}
        args, kwargs = without_data(args), without_data(kwargs)
        result = result_of(func, args, kwargs)
        count = self._counts.get(func.overloadpacket)
        if count is not None:
            self.products += count(*args, **kwargs, out_val=result)
        return result
