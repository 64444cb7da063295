"""Choices that an earlier session made for the same model: the same plan, without its enumeration."""

from __future__ import annotations

import json
import logging
import shutil

import numpy as np
import pytest

import fmtprop as fp
from fmtprop.store import Store, keep_text, text_of, texts

onnx = pytest.importorskip("onnx")

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 3, 12, 12] x) => (float[n, M, H, W] y)
<float[8, 3, 3, 3] w> {
    c = Conv<pads = [1, 1, 1, 1]>(x, w)
    r = Relu(c)
    y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
}"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))
    return tmp_path / texts.FOLDER


def session(seed=0, **options):
    model = onnx.parser.parse_model(MODEL)
    numbers = np.random.default_rng(seed).standard_normal((8, 3, 3, 3)).astype(np.float32)
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, "w"))
    return fp.onnx.InferenceSession(model, deterministic=True, **options), numbers


def run(made, numbers, batch=1):
    import torch

    x = np.random.default_rng(batch).standard_normal((batch, 3, 12, 12)).astype(np.float32)
    (got,) = made.run(None, {"x": x})
    conv = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(numbers), padding=1)
    wanted = torch.nn.functional.max_pool2d(conv.relu(), 2)
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-4)
    return list(made.plans.values())[-1].compilation


def steps(compilation):
    nodes = [step.node for step in compilation.plan.steps]
    return [(node.name, node.choice.impl, dict(node.choice.operands), node.descs) for node in nodes]


def test_a_later_session_has_the_plan_of_an_earlier_one(directory):
    first = run(*session())
    assert first.certificate is not None
    assert len(list(directory.iterdir())) == 1
    made, numbers = session(seed=1)  # weights are no part of the choices
    second = run(made, numbers)
    assert steps(second) == steps(first)
    assert second.is_like_another_shape
    assert run(made, numbers, batch=3).is_like_another_shape


def test_other_options_have_choices_of_their_own(directory):
    run(*session())
    assert not run(*session(special_values="exact")).is_like_another_shape
    assert len(list(directory.iterdir())) == 2


def test_damaged_or_foreign_choices_make_no_wrong_result(directory, caplog):
    run(*session())
    (file,) = directory.iterdir()
    keep_text(file.stem, '{"nodes": 7}')
    with caplog.at_level(logging.WARNING):
        assert not run(*session()).is_like_another_shape
    assert "damaged" in caplog.text
    other = fp.onnx.InferenceSession(
        onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) {y = Exp(x)}'),
        deterministic=True,
    )
    other.run(None, {"x": np.zeros(2, np.float32)})
    (foreign,) = set(directory.iterdir()) - {file}
    shutil.copy(foreign, file)
    run(*session())


def test_only_the_choices_of_the_optimal_policy_are_remembered(directory):
    run(*session(policy="propagate"))
    assert not directory.exists()


def test_findings_come_with_the_choices():
    first = run(*session())
    second = run(*session())
    assert second.is_like_another_shape
    assert second.certificate == first.certificate
    assert (second.tuning, second.race) == (first.tuning, first.race)


def test_damaged_findings_are_left_out(directory, caplog):
    run(*session())
    (file,) = directory.iterdir()
    document = json.loads(text_of(file.stem))
    keep_text(file.stem, json.dumps(document | {"findings": {"certificate": 3}}))
    with caplog.at_level(logging.WARNING):
        compilation = run(*session())
    assert compilation.is_like_another_shape
    assert compilation.certificate is None
    assert "findings" in caplog.text


def test_choices_end_with_the_figures_that_decided_them():
    run(*session())
    assert run(*session()).is_like_another_shape
    Store().add_figures({"a problem": 1e-3})  # as tuning does, maybe of the same layers
    assert not run(*session()).is_like_another_shape
    assert run(*session()).is_like_another_shape


FILTERED = """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 64, 56, 56] x) => (float[n, M, H, W] y)
<float[64, 64, 3, 3] w> {
    a = Relu(x)
    y = Conv<pads = [1, 1, 1, 1]>(a, w)
}"""


def test_a_node_that_runs_as_several_does_so_again_with_its_certificate():
    model = onnx.parser.parse_model(FILTERED)
    x = np.random.default_rng(0).standard_normal((1, 64, 56, 56)).astype(np.float32)
    found = []
    for seed in range(2):
        numbers = np.random.default_rng(seed).standard_normal((64, 64, 3, 3)).astype(np.float32)
        del model.graph.initializer[:]
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, "w"))
        made = fp.onnx.InferenceSession(model, deterministic=True)
        made.run(None, {"x": x})
        found += [plan.compilation for plan in made.plans.values()]
    first, second = found
    assert second.is_like_another_shape
    assert [node.name for node in first.formatted.nodes()] == [node.name for node in second.formatted.nodes()]
    assert first.certificate is not None
    assert second.certificate == first.certificate
