"""The examples of docs/deploy.md run, in their order."""

import re
from pathlib import Path

import torch

TEXT = (Path(__file__).parents[2] / "docs/deploy.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    names = {"model": torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(-1)), "example": torch.randn(2, 8)}
    torch.set_num_threads(1)
    try:
        blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        assert len(blocks) >= 4
        for block in blocks:
            exec(block, names)
        assert names["batch"]["scores"].shape == (2, 4)
    finally:
        torch.set_num_threads(before)
