"""Executing a primitive, or a kernel, as a plan does, to be timed: prebuilt arguments over somebody else's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

from fmtprop import dnnl
from fmtprop.jit import StandaloneKernel, Work


class Argument(NamedTuple):
    """An argument of an execution: its number or name, its descriptor, and where it lies."""

    number: int | str
    md: dnnl.NativeDesc
    pointer: int


class TimedCall:
    """A primitive and its arguments, ready to be executed many times.

    Parameters
    ----------
    pd : PrimitiveDesc
        What to run; compiled here.
    arguments : sequence of Argument
        All but the scratchpad.
    scratchpad : int
        Address of at least ``pd.scratchpad_nbytes`` bytes.
    after : Work, optional
        What runs on the result behind it.

    Raises
    ------
    DnnlError
        oneDNN could not compile it.
    """

    def __init__(
        self, pd: dnnl.PrimitiveDesc, arguments: Sequence[Argument], scratchpad: int = 0, after: Work | None = None
    ) -> None:
        engine = dnnl.Engine.cpu()
        self._pd, self._after = pd, after
        self._stream = dnnl.Stream(engine)
        self._memories = {int(number): dnnl.Memory(engine, md, pointer) for number, md, pointer in arguments}
        bound = dict(self._memories)
        md = pd.query_md("scratchpad")
        if md is not None and md.nbytes:
            bound[int(dnnl.Arg.SCRATCHPAD)] = dnnl.Memory(engine, md, scratchpad)
        self._primitive = dnnl.Primitive(pd)
        self._arguments = dnnl.ExecArgs(list(bound.items()))

    def point(self, pointers: Mapping[int | str, int]) -> None:
        """Point arguments at other memory."""
        for number, pointer in pointers.items():
            self._memories[int(number)].set_data_handle(pointer)

    def seconds(self, repeats: int = 1) -> float:
        """Return the time of so many executions in a row.

        Raises
        ------
        DnnlError
            An execution failed.
        """
        execute, primitive, stream = dnnl.hot_execute, self._primitive.handle, self._stream.handle
        count, array = self._arguments.count, self._arguments.array
        status = 0
        start = perf_counter()
        for _ in range(repeats):
            status = execute(primitive, stream, count, array) or status
            if self._after is not None:
                self._after.run()
        self._stream.wait()
        taken = perf_counter() - start
        if status:
            dnnl.raise_status("dnnl_primitive_execute", status, str(self._pd), self._pd.repro)
        return taken

    def close(self) -> None:
        """Release the native objects; the primitive descriptor stays its owner's."""
        self._arguments = dnnl.ExecArgs([])
        for memory in self._memories.values():
            memory.close()
        self._primitive.close()
        self._stream.close()


class TimedKernel:
    """A kernel that runs instead of a primitive, and its arguments, ready to be run many times.

    Parameters
    ----------
    kernel : StandaloneKernel
        What to run.
    arguments : sequence of Argument
        All of them, by name.
    """

    def __init__(self, kernel: StandaloneKernel, arguments: Sequence[Argument]) -> None:
        self._work = kernel.work(dnnl.lib().threads)
        self.point({name: pointer for name, _, pointer in arguments})

    def point(self, pointers: Mapping[int | str, int]) -> None:
        """Point arguments at other memory."""
        for name, pointer in pointers.items():
            self._work.pointers[str(name)].set_data_handle(pointer)

    def seconds(self, repeats: int = 1) -> float:
        """Return the time of so many executions in a row."""
        start = perf_counter()
        for _ in range(repeats):
            self._work.run()
        return perf_counter() - start

    def close(self) -> None:
        """Do nothing: there are no native objects."""
