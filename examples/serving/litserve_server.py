"""Plans behind LitServe: ``python examples/serving/litserve_server.py resnet50.fmtplan --port 8080``.

A request is one row, ``{"input": [...]}`` with the model's names; LitServe joins rows to batches, and starts a process
for each worker.
"""

from __future__ import annotations

import argparse
from typing import Any

import litserve
import torch
from fastapi import HTTPException

from fmtprop.errors import FmtpropError, InputError
from fmtprop.serving import Rows


class Plan(litserve.LitAPI):
    """A plan as LitServe calls it."""

    def __init__(self, path: str, threads: int, **options: Any) -> None:
        super().__init__(**options)
        self._path, self._threads = path, threads

    def setup(self, device: str) -> None:
        """Load the plan in a worker."""
        torch.set_num_threads(self._threads)  # before the plan is loaded
        self._rows = Rows(self._path)

    def decode_request(self, request) -> list[torch.Tensor]:  # LitServe reads a type as that of a form
        """Return the inputs of a row; one that does not fit is refused before it comes into a batch."""
        try:
            row = [torch.tensor(request[spec.name]).to(spec.dtype)[None] for spec in self._rows.inputs]
            self._rows.check(row)
        except InputError as error:
            raise HTTPException(400, str(error)) from error
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            names = ", ".join(spec.name for spec in self._rows.inputs)
            raise HTTPException(400, f"a request must have {names}, as nested lists of numbers: {error}") from error
        return row

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Leave rows as they are: those of equal sizes are joined when they run."""
        return inputs

    def predict(self, x: list[list[torch.Tensor]]) -> list[Any]:
        """Return the results or the error of each row."""
        return self._rows.run_each(x)

    def unbatch(self, output: list[Any]) -> list[Any]:
        """Return what there is for each row."""
        return output

    def encode_response(self, output: Any) -> dict[str, Any]:
        """Return the results of a row by their names."""
        if isinstance(output, FmtpropError):
            raise HTTPException(400, str(output))
        return {spec.name: one[0].tolist() for spec, one in zip(self._rows.outputs, output, strict=True)}


def main() -> None:
    """Serve a plan file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", help="a plan file, or a folder with plans of one model")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--batch", type=int, default=8, help="rows that run together, at least 2")
    given = parser.parse_args()
    api = Plan(given.plan, given.threads, max_batch_size=given.batch, batch_timeout=0.005)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=given.workers)
    server.run(port=given.port, generate_client_file=False)


if __name__ == "__main__":
    main()
