"""The examples of docs/deploy.md run, in their order; those that need Ray in a run of their own."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")


def run(kinds):
    """Run the blocks of some kinds; return their names."""
    before = torch.get_num_threads()
    names = {"model": torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(-1)), "example": torch.randn(2, 8)}
    names |= {"large": torch.nn.Linear(64, 64), "image": torch.randn(2, 64)}
    torch.set_num_threads(1)
    try:
        blocks = re.findall(r"```python ?(\w*)\n(.*?)```", TEXT, re.DOTALL)
        assert len(blocks) >= 9 and {kind for kind, _ in blocks} == {"", "ray"}
        for kind, block in blocks:
            if kind in kinds:
                exec(block, names)
        return names
    finally:
        torch.set_num_threads(before)


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run({""})
    assert names["batch"]["scores"].shape == (2, 4)
    assert names["scores"].shape == (7, 4)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_the_examples_on_ray_run(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fmtprop[ray]'")
    monkeypatch.chdir(tmp_path)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        run({"", "ray"})
    finally:
        from ray import serve

        serve.shutdown()
        ray.shutdown()


def test_the_files_that_the_page_names_are_there():
    for path in re.findall(r"\]\(\.\./(examples/[^)]*)\)", TEXT) + re.findall(r"examples/\w+\.py", TEXT):
        assert (ROOT / path).is_file(), path
