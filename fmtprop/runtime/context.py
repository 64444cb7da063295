"""One execution context: an arena, memory objects over it, and the prebuilt calls of every step.

A context serves one run at a time; concurrent runs of a plan use one each and share the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from fmtprop import dnnl
from fmtprop.errors import DnnlError
from fmtprop.ir.tensors import torch_dtype
from fmtprop.runtime.calls import call_reference
from fmtprop.runtime.plan import Access, Home, Plan, Step
from fmtprop.targets.arguments import arguments, start_of
from fmtprop.targets.memory import huge_bytes, view, view_of_tensor

#: (function, its four arguments); a function returns 0 or an error status
_Call = tuple[Callable[..., Any], Any, Any, Any, Any]


class Context:
    """Memory and calls of one run.

    Parameters
    ----------
    plan : Plan
        What to run.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._engine = dnnl.Engine.cpu()
        self._stream = dnnl.Stream(self._engine)
        self._arena = huge_bytes(plan.arena_nbytes)
        #: buffer -> memory objects to point at the caller's tensor of each run, and their bytes from its start
        self._external: dict[int, list[tuple[dnnl.Memory, int]]] = {}
        #: buffer -> the caller's tensor of the current run
        self._tensors: dict[int, torch.Tensor] = {}
        self._keep: list[object] = []
        self._calls: list[_Call] = [self._call_of(step) for step in plan.steps]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Execute every step; inputs are checked and lie as the plan says.

        Returns
        -------
        list of torch.Tensor
            New tensors, the caller's to keep.
        """
        self._bind(inputs)
        for number, (function, a, b, c, d) in enumerate(self._calls):
            status = function(a, b, c, d)
            if status:
                self._fail(number, status)
        self._stream.wait()
        return self._results()

    def profile(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[float]]:
        """Execute like :meth:`run` and return the seconds of each step beside the results."""
        self._bind(inputs)
        seconds = []
        for number, (function, a, b, c, d) in enumerate(self._calls):
            start = perf_counter()
            status = function(a, b, c, d)
            self._stream.wait()
            seconds.append(perf_counter() - start)
            if status:
                self._fail(number, status)
        return self._results(), seconds

    def close(self) -> None:
        """Release the native objects."""
        for item in self._keep:
            close = getattr(item, "close", None)
            if close is not None:
                close()
        self._calls.clear()
        self._stream.close()

    # ------------------------------------------------------------------ a run

    def _bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Point the external memories at this run's tensors."""
        for (_, _, buffer), tensor in zip(self.plan.inputs, inputs, strict=True):
            if buffer >= 0:
                self._point(buffer, tensor)
        for _, access in self.plan.outputs:
            if self.plan.buffers[access.buffer].home is Home.OUTPUT:
                desc = access.desc
                # whatever the caller's default device is
                result = torch.empty_strided(desc.dims, desc.strides, dtype=torch_dtype(desc.dtype), device="cpu")
                self._point(access.buffer, result)

    def _point(self, buffer: int, tensor: torch.Tensor) -> None:
        self._tensors[buffer] = tensor
        pointer = tensor.data_ptr()
        for memory, start in self._external.get(buffer, ()):
            memory.set_data_handle(pointer + start)

    def _results(self) -> list[torch.Tensor]:
        results = []
        for _, access in self.plan.outputs:
            if self.plan.buffers[access.buffer].home is Home.OUTPUT:
                results.append(self._tensors[access.buffer])
            else:
                results.append(self._tensor(access).clone(memory_format=torch.preserve_format))
        self._tensors.clear()
        return results

    def _fail(self, number: int, status: int) -> None:
        step = self.plan.steps[number]
        pd = step.primitive.desc
        raise DnnlError(
            "dnnl_primitive_execute", dnnl.status_name(status), f"{step.node.label} with {pd.impl}", pd.repro
        )

    # ------------------------------------------------------------------ building

    def _call_of(self, step: Step) -> _Call:
        if step.primitive is None:
            return (self._call_reference, step, None, None, None)
        places = {**step.operands, **dict(zip(("dst", "dst_1", "dst_2"), step.results, strict=False))}
        pd = step.primitive.desc
        bound = [(number, self._memory(places[name], md)) for name, number, md in arguments(step.node, pd)]
        if step.scratchpad is not None:
            md = pd.query_md("scratchpad")
            pointer = self._arena.data_ptr() + self.plan.buffers[step.scratchpad].offset
            bound.append((dnnl.Arg.SCRATCHPAD, dnnl.Memory(self._engine, md, pointer)))
        call = dnnl.ExecArgs(bound)
        self._keep += [memory for _, memory in bound]
        self._keep.append(call)
        return (dnnl.hot_execute, step.primitive.handle, self._stream.handle, call.count, call.array)

    def _memory(self, access: Access, md: dnnl.NativeDesc) -> dnnl.Memory:
        buffer = self.plan.buffers[access.buffer]
        start = start_of(access.desc, md)
        if buffer.home is Home.ARENA:
            return dnnl.Memory(self._engine, md, self._arena.data_ptr() + buffer.offset + start)
        if buffer.home is Home.CONSTANT:
            return dnnl.Memory(self._engine, md, self.plan.constants[buffer.index].data_ptr() + start)
        memory = dnnl.Memory(self._engine, md, None)
        self._external.setdefault(access.buffer, []).append((memory, start))
        return memory

    def _tensor(self, access: Access) -> torch.Tensor:
        buffer = self.plan.buffers[access.buffer]
        if buffer.home is Home.ARENA:
            return view(self._arena, access.desc, buffer.offset)
        if buffer.home is Home.CONSTANT:
            return view(self.plan.constants[buffer.index], access.desc)
        return view_of_tensor(self._tensors[access.buffer], access.desc)

    def _call_reference(self, step: Step, *_: None) -> int:
        operands = {name: self._tensor(access) for name, access in step.operands.items()}
        for access, value in zip(step.results, call_reference(step.node, operands), strict=True):
            self._tensor(access).copy_(value)
        return 0
