"""The Python code in the README runs as it stands. (pytest runs the other documents' examples, as doctests.)"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks build on each other; a few names in them are the reader's own."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names = {
        "array": np.ones((2, 17, 5, 7), np.float32),
        "model": torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval(),
        "example": torch.randn(1, 3, 8, 8),
        "x": torch.randn(1, 3, 8, 8),
        "batch": [torch.randn(1, 3, 8, 8) for _ in range(3)],
    }
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert len(blocks) == 3
    assert (tmp_path / "net.json").exists()
    torch.testing.assert_close(names["y"], names["model"](names["x"]))
