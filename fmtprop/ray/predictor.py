"""A callable class for ``Dataset.map_batches``: columns in, columns out, in batches of the plan's size.

Owns the way between columns and the tensors of a plan, and the threads of an actor. Ray itself is not needed to use it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch

from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.loading import load_plan
from fmtprop.errors import InputError
from fmtprop.ir.tensors import torch_dtype
from fmtprop.system.limits import MAX_THREADS

#: columns of a batch, as Ray gives them with ``batch_format="numpy"``
Batch = Mapping[str, np.ndarray[Any, Any]]


class Predictor:
    """A model for ``Dataset.map_batches``, with its own number of threads in each actor.

    Parameters
    ----------
    plan : str, path, bytes or CompiledModel
        A plan file, its bytes, or a compiled model, which Ray carries as the bytes of its plan file. Actors of one
        machine that get the path share the memory of the weights.
    outputs : sequence of str, optional
        Columns of the results. Default: the names of the plan's outputs.
    threads : int, optional
        Threads of this process. Default: the CPUs that Ray assigned to the actor, rounded down, at least one;
        unchanged outside of Ray. They are set before the plan is loaded, which is made again if it is for another
        number.

    Raises
    ------
    PlanError
        The plan cannot be loaded.
    InputError
        The model's inputs or results do not begin with one batch axis, or a parameter does not fit.

    Notes
    -----
    Columns that are named as the model's inputs are its arguments, with the batch axis first; all columns pass through,
    and the results are added. A batch may have any number of rows: it runs in parts of the plan's batch size, the last
    one filled up with zeros, so the model must treat each row alone, as every model in evaluation mode does.

    Examples
    --------
    >>> import numpy as np, torch, fmtprop as fp
    >>> predict = Predictor(fp.compile(torch.nn.Linear(8, 4), torch.ones(2, 8)), outputs=["y"])
    >>> batch = predict({"input": np.ones((3, 8), np.float32), "id": np.arange(3)})
    >>> batch["y"].shape, batch["id"].tolist()
    ((3, 4), [0, 1, 2])
    """

    def __init__(
        self,
        plan: str | PathLike[str] | bytes | CompiledModel,
        *,
        outputs: Sequence[str] | None = None,
        threads: int | None = None,
    ) -> None:
        count = _assigned() if threads is None else threads
        if count is not None:
            if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MAX_THREADS:
                raise InputError(f"threads must be a whole number from 1 to {MAX_THREADS}, got {threads!r}")
            torch.set_num_threads(count)
        self.net = plan if isinstance(plan, CompiledModel) else load_plan(plan)
        self._inputs = [(name, desc) for name, desc, _ in self.net.plan.inputs]
        results = [(name, access.desc) for name, access in self.net.plan.outputs]
        rows = {desc.dims[:1] for _, desc in (*self._inputs, *results)}
        if len(rows) != 1 or () in rows or not self._inputs:
            raise InputError(
                f"model {self.net.plan.name}: its inputs and results begin with {sorted(rows)}: each must begin with "
                "the same batch axis"
            )
        ((self.rows,),) = rows
        self.outputs = tuple(outputs) if outputs is not None else tuple(name for name, _ in results)
        if len(self.outputs) != len(results):
            raise InputError(f"model {self.net.plan.name} has {len(results)} results, got outputs={self.outputs}")

    def __call__(self, batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
        """Return the columns of a batch, and those of the model's results.

        Raises
        ------
        InputError
            A column is missing, or a row does not fit; the message names both.
        """
        columns = [self._column(batch, name, desc) for name, desc in self._inputs]
        count = len(columns[0])
        for (name, _), column in zip(self._inputs, columns, strict=True):
            if len(column) != count:
                raise InputError(f"column {name!r} has {len(column)} rows, column {self._inputs[0][0]!r} has {count}")
        parts = [self._run([c[first : first + self.rows] for c in columns]) for first in range(0, count, self.rows)]
        if not parts:
            return dict(batch)
        made = [torch.cat(tensors).numpy() for tensors in zip(*parts, strict=True)]
        return {**batch, **dict(zip(self.outputs, made, strict=True))}

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        count = len(tensors[0])
        if count < self.rows:
            tensors = [torch.cat((one, one.new_zeros(self.rows - count, *one.shape[1:]))) for one in tensors]
        return [result[:count] for result in self.net.run_flat(tensors)]

    def _column(self, batch: Batch, name: str, desc: Any) -> torch.Tensor:
        if name not in batch:
            raise InputError(f"the batch has no column {name!r}; it has {', '.join(map(repr, batch)) or 'none'}")
        column, dims = np.asarray(batch[name]), desc.dims[1:]
        if column.dtype == object or column.shape[1:] != dims:
            for row, item in enumerate(column):
                if np.shape(item) != dims:
                    raise InputError(f"row {row} of column {name!r} has shape {np.shape(item)}, the model takes {dims}")
            column = np.stack([np.asarray(item) for item in column]) if len(column) else column.reshape(0, *dims)
        wanted = torch_dtype(desc.dtype)
        if column.dtype == object or column.dtype.kind not in "fiub":
            raise InputError(f"column {name!r} holds {column.dtype}, the model takes {wanted}")
        tensor = torch.from_numpy(np.ascontiguousarray(column) if column.flags.writeable else column.copy())
        if tensor.is_floating_point() != wanted.is_floating_point:
            raise InputError(f"column {name!r} holds {tensor.dtype}, the model takes {wanted}; convert it before")
        return tensor.to(wanted)


def _assigned() -> int | None:
    """Return the CPUs that Ray assigned to this worker; None outside of one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    assigned = ray.get_runtime_context().get_assigned_resources().get("CPU")
    return None if assigned is None else max(1, int(assigned))
