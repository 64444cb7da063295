"""`fmtprop tune`: what it measures is what later compilations find."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import fmtprop

pytestmark = pytest.mark.usefixtures("own_cache")


def test_what_was_measured_is_known_to_later_compilations(capsys):
    code, out, err = fmtprop(capsys, "tune", "chain", "--json")
    assert (code, err) == (0, "")
    tuned = json.loads(out)
    assert tuned["model"] == "chain"
    # PyTorch's operators are modelled
    modelled = tuned["tuning"]["modelled"]
    assert tuned["tuning"]["measured"] > modelled
    assert 0 < tuned["certificate"]["bound"] <= tuned["certificate"]["objective"]
    code, out, _ = fmtprop(capsys, "run", "chain", "-n", 1)
    assert code == 0
    assert f"costs: 0 measured, {tuned['tuning']['measured']} from the cache, {modelled} from the model" in out


def test_what_is_known_is_measured_again_if_asked(capsys):
    counts = []
    for arguments in ((), (), ("--again",)):
        code, out, err = fmtprop(capsys, "tune", "chain", "--json", *arguments)
        assert (code, err) == (0, "")
        tuning = json.loads(out)["tuning"]
        counts.append((tuning["measured"], tuning["cached"]))
    (first, _), *_ = counts
    assert first > 0 and counts == [(first, 0), (0, first), (first, 0)]


def test_a_budget_that_ends_at_once_leaves_the_rest_to_the_model(capsys):
    code, out, err = fmtprop(capsys, "tune", "chain", "--budget", 0.001, "--threads", 1)
    assert (code, err) == (0, "")
    first, costs, plan = out.splitlines()
    assert first == "chain, f32, 1 thread"
    assert costs.startswith("costs: ") and costs.endswith(" from the model")
    assert plan.startswith("plan: ") and "proved optimal" in plan
