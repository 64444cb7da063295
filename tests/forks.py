"""Processes of benchmarks, forked from one that has imported PyTorch: to import it takes a second of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from typing import Any

import pytest

from fmtprop.bench import processes

_SERVER = get_context("forkserver")


class _Forks:
    """What the benchmarks need of a context; the environment is the present one, not that of the server's start."""

    Pipe = _SERVER.Pipe

    @staticmethod
    def Process(target: Callable[..., None], args: tuple[Any, ...], name: str) -> Any:
        return _SERVER.Process(target=_within, args=(dict(os.environ), target, *args), name=name)


def _within(environment: Mapping[str, str], target: Callable[..., None], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


@pytest.fixture(autouse=True)
def forked_contenders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork the processes of benchmarks."""
    _SERVER.set_forkserver_preload(["torch", "fmtprop.bench.contenders"])
    monkeypatch.setattr(processes, "get_context", lambda _: _Forks)
    yield
