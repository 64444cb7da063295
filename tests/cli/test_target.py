"""`--target`: the same commands on PyTorch's own oneDNN."""

from __future__ import annotations

import json

from tests.cli.command import fmtprop


def test_run_on_pytorchs_own_onednn(capsys):
    code, out, err = fmtprop(
        capsys, "run", "residual", "-n", 1, "--target", "mkldnn", "--json", "-p", "plain,propagate"
    )
    assert (code, err) == (0, "")
    plain, propagate = json.loads(out)["policies"]
    assert "inside PyTorch" in plain["machine"]["onednn"]
    steps = [step["impl"] for step in propagate["steps"]]
    assert sum(impl.startswith("mkldnn::_convolution_pointwise") for impl in steps) == 3


def test_show_says_who_runs_what(capsys):
    code, out, _ = fmtprop(capsys, "show", "chain", "--target", "mkldnn", "-p", "propagate")
    assert code == 0
    assert "mkldnn::_convolution_pointwise+relu" in out and "mkldnn::_reorder_convolution_weight" in out


def test_bench_runs_it(capsys):
    code, out, _ = fmtprop(
        capsys, "bench", "chain", "--target", "mkldnn", "--rounds", 1, "--vs", "torch", "-p", "plain"
    )
    assert code == 0, out


def test_unknown_targets_are_bad_arguments(capsys):
    code, _, err = fmtprop(capsys, "run", "chain", "--target", "gpu")
    assert code == 2
    assert "'target' parameter of compile must be one of 'onednn', 'mkldnn'" in err
