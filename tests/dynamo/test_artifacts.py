"""Artefacts of PyTorch's cache: a second process starts with the first one's choices."""

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

import fmtprop.dynamo
from fmtprop.compiling.choices import choices_of
from fmtprop.errors import FmtpropError
from tests import processes

SCRIPT = """
import logging, sys, torch
import fmtprop.dynamo
from pathlib import Path
told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
logging.getLogger("fmtprop.dynamo.region").addHandler(handler)
logging.getLogger("fmtprop.dynamo.region").setLevel(logging.INFO)
from fmtprop.compiling import compilation
checks, check = [], compilation.check_steps
compilation.check_steps = lambda *given: checks.append(given) or check(*given)
which, path, scale = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
if which == "second":
    assert torch.compiler.load_cache_artifacts(path.read_bytes()).artifacts["fmtprop"]
torch.manual_seed(0)
module = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3)
).eval()
module[0].weight.data.mul_(scale)
x = torch.randn(1, 3, 32, 32)
with torch.no_grad():
    net = torch.compile(module, backend="fmtprop", options={"weights": "int8"} if scale == 3 else {})
    result = net(x)
    torch.testing.assert_close(result, module(x), rtol=1e-3, atol=1e-3)
if which == "first":
    path.write_bytes(torch.compiler.save_cache_artifacts()[0])
print(any("in an earlier process" in text for text in told), len(told), "checked" if checks else "unchecked")
"""


def run(which, path, scale=1.0):
    done = processes.run("-c", SCRIPT, which, path, scale)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_second_process_takes_the_first_ones_choices(tmp_path, monkeypatch):
    """Without a comparison or a check; also with other weights, of which nothing is in the artefact.

    Other options are another key.
    """
    path = tmp_path / "artifacts"
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path / "costs"))
    assert run("first", path) == ["False", "1", "checked"]
    assert run("second", path) == ["True", "1", "unchecked"]
    assert run("second", path, 2.0) == ["True", "1", "unchecked"]
    assert run("second", path, 3.0)[:2] == ["False", "1"]
    assert path.stat().st_size < 20_000


@pytest.fixture
def fresh():
    """No artefacts of other tests."""
    with CacheArtifactManager.with_fresh_cache():
        yield


def test_a_damaged_artefact_is_left_out(fresh, monkeypatch, caplog):
    """With one line in the log, and right results."""
    from fmtprop.dynamo import artifacts

    monkeypatch.setattr(artifacts, "_LOADED", {})
    monkeypatch.setattr(artifacts, "key_of", lambda graph, options: "key")
    module, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
    artifacts.keep("key", b"no artefact")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=fmtprop.dynamo.backend)(x), module(x))
    assert "is damaged, and the graph is compiled without it" in caplog.text


def test_hostile_choices_are_refused():
    for text in ("[]", "{}", '{"nodes": [1], "descs": []}', '{"nodes": [], "descs": [["f32", [1], "qq"]]}'):
        with pytest.raises(FmtpropError):
            choices_of(text)


AHEAD = """
import sys, torch
import fmtprop.dynamo
from fmtprop.dynamo import artifacts
which, path = sys.argv[1:]
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16)
        self.second = torch.nn.Conv2d(16, 16, 3)
    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu())
module = Net().eval()
x = torch.randn(1, 3, 32, 32)
with torch.no_grad():
    if which == "first":
        function = torch.compile(module, backend="fmtprop", fullgraph=True).forward.aot_compile(((x,), {}))
    else:
        with open(path, "rb") as file:
            function = torch.compiler.load_compiled_function(file)
        assert artifacts.known()
    result = function(module, x)
    torch.testing.assert_close(result, module(x), rtol=1e-4, atol=1e-5)
    module.first.weight.data.mul_(2)
    torch.testing.assert_close(function(module, x), module(x), rtol=1e-4, atol=1e-5)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(function(module, x), module(x), rtol=1e-4, atol=1e-5)
if which == "first":
    function.save_compiled_function(path)
print(result.view(torch.int32).sum().item(), len(artifacts.known()))
"""


def test_a_function_that_is_compiled_ahead_is_saved_and_loaded(tmp_path):
    """torch.compile's aot_compile: with other weights and inputs, too."""
    path = str(tmp_path / "function")
    first, second = (processes.run("-c", AHEAD, which, path).stdout for which in ("first", "second"))
    assert second.split()[1] == first.split()[1]
