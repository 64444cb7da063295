"""Programs in processes of their own that begin with PyTorch imported: they start in 0.02 s instead of 2 to 4 s.

For programs that need a process of their own, not a new interpreter: oneDNN is not loaded in it, no primitive was made,
and no environment variable was read but OpenMP's.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.export", "fmtprop.dynamo", "fmtprop.cli"])


def run(*words: object, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with command-line arguments, which begin with ``-c``, ``-m`` or a file; return what it wrote."""
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        given = [str(word) for word in words], {**os.environ, **environment}, os.getcwd(), files
        process = _CONTEXT.Process(target=_run, args=given)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(given[0], timeout)
        return subprocess.CompletedProcess(given[0], process.exitcode or 0, *(file.read_text() for file in files))


def _run(words: list[str], environment: dict[str, str], folder: str, files: list[Path]) -> None:
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    option, *rest = words
    if option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv, main = ["-c", *rest[1:]], ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = words
        runpy.run_path(option, run_name="__main__")
