"""Running a plan: inputs checked, a free context found or made, results handed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fmtprop import dnnl
from fmtprop.errors import InputError
from fmtprop.ir.tensors import data_type
from fmtprop.layout import MemoryDesc
from fmtprop.runtime.context import Context
from fmtprop.runtime.plan import Plan


class Executor:
    """Runs one plan, from any number of threads at once.

    Parameters
    ----------
    plan : Plan
        What to run.

    Notes
    -----
    Contexts are made on demand and kept for later runs: as many as ever ran at the same time. In a forked child, whose
    OpenMP threads did not survive, runs go to a thread of its own.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._free: deque[Context] = deque()

    def run(self, inputs: Sequence[object]) -> list[torch.Tensor]:
        """Execute the plan.

        Parameters
        ----------
        inputs : sequence of torch.Tensor
            One for each graph input, any strides.

        Returns
        -------
        list of torch.Tensor
            New tensors; a later run never overwrites them.

        Raises
        ------
        InputError
            Number, shape, data type or device of an input does not fit.
        """
        tensors = self._check(inputs)
        if dnnl.fork_guard():
            return dnnl.after_fork(lambda: self._run(tensors))
        return self._run(tensors)

    def profile(self, inputs: Sequence[object]) -> tuple[list[torch.Tensor], list[float]]:
        """Execute the plan once and return the seconds of each step beside the results."""
        tensors = self._check(inputs)
        if dnnl.fork_guard():
            return dnnl.after_fork(lambda: self._profile(tensors))
        return self._profile(tensors)

    def close(self) -> None:
        """Release every context that is not running."""
        while self._free:
            self._free.pop().close()

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self._threads():
            context = self._context()
            results = context.run(tensors)
            self._free.append(context)
            return results

    def _profile(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[float]]:
        with self._threads():
            context = self._context()
            outcome = context.profile(tensors)
            self._free.append(context)
            return outcome

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Run with the threads that the primitives were made for: their scratchpads have room for no more."""
        library, wanted = dnnl.lib(), self.plan.threads
        # a thread that is new to torch takes over the number that was set for the process
        torch.get_num_threads()
        current = library.threads
        if current == wanted:
            yield
            return
        library.set_threads(wanted)
        try:
            yield
        finally:
            library.set_threads(current)

    def _context(self) -> Context:
        try:
            return self._free.pop()
        except IndexError:
            return Context(self.plan)

    def _check(self, inputs: Sequence[object]) -> list[torch.Tensor]:
        expected = self.plan.inputs
        if len(inputs) != len(expected):
            names = ", ".join(name for name, _, _ in expected)
            raise InputError(f"model {self.plan.name} takes {len(expected)} inputs ({names}), got {len(inputs)}")
        return [_lay_out(name, tensor, desc) for (name, desc, _), tensor in zip(expected, inputs, strict=True)]


def _lay_out(name: str, tensor: object, desc: MemoryDesc) -> torch.Tensor:
    """Return the tensor in the format that the plan reads: itself, or a copy."""
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"input {name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise InputError(f"input {name} is on {tensor.device}, but plans run on the CPU: pass {name}.cpu()")
    if tensor.layout is not torch.strided:
        raise InputError(f"input {name} has layout {tensor.layout}; pass a strided tensor ({name}.to_dense())")
    if tuple(tensor.shape) != desc.dims:
        raise InputError(
            f"input {name} has shape {tuple(tensor.shape)}, but the model was compiled for {desc.dims}; "
            "compile again with example inputs of this shape"
        )
    if not _has_memory(tensor):
        raise InputError(
            f"input {name} has no memory of its own (a fake tensor, one inside torch.func.vmap or torch.compile, or "
            "one whose storage was emptied); pass a real tensor, and call the model outside of what transforms it"
        )
    if data_type(tensor.dtype) is not desc.dtype:
        raise InputError(f"input {name} is {tensor.dtype}, but the model was compiled for {desc.dtype.value}")
    tensor = tensor.detach()
    same = all(n == 1 or a == b for n, a, b in zip(desc.dims, tensor.stride(), desc.strides, strict=True))
    if same and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty_strided(desc.dims, desc.strides, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether there are numbers to read: wrappers and tensors that only record refuse, or point nowhere."""
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False
