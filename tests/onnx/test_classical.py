"""Operators of ``ai.onnx.ml``, and models that scikit-learn's converter writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import fmtprop as fp
from fmtprop.errors import ImportModelError

OPTIONS = {"policy": "propagate", "confirm": False}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((80, 6)).astype(np.float32)


def model_of(op: str, attributes: dict[str, Any], extra: dict[str, Any], outputs: int = 1) -> Any:
    names = [f"y{index}" for index in range(outputs)]
    node = helper.make_node(op, ["x", *extra], names, domain="ai.onnx.ml", **attributes)
    kinds = [TensorProto.FLOAT] if outputs == 1 else [TensorProto.INT64, TensorProto.FLOAT]
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [80, 6])],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds, strict=True)],
        initializer=[helper.make_tensor(k, TensorProto.INT64, [len(v)], v) for k, v in extra.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


@pytest.mark.parametrize("op, attributes, extra", [
    ("Scaler", {"offset": [1.0, 2, 3, 4, 5, 6], "scale": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}, {}),
    ("Scaler", {"offset": [0.5], "scale": [2.0]}, {}),
    ("Normalizer", {"norm": "L1"}, {}),
    ("Normalizer", {"norm": "L2"}, {}),
    ("Binarizer", {"threshold": 0.3}, {}),
    ("ArrayFeatureExtractor", {}, {"places": [4, 0, 4]}),
    ("LinearRegressor", {"coefficients": [0.5] * 12, "intercepts": [1.0, -1.0], "targets": 2}, {}),
    ("LinearRegressor", {"coefficients": [0.5, 1, 2, 3, 4, 5], "intercepts": [0.25]}, {}),
])  # fmt: skip
def test_is_part_of_a_plan(op, attributes, extra):
    model = model_of(op, attributes, extra)
    session = fp.onnx.InferenceSession(model, **OPTIONS)
    (got,), (want,) = session.run(None, {"x": X}), ReferenceEvaluator(model).run(None, {"x": X})
    assert session.reason is None
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_largest_divides_with_its_sign():
    """As ONNX's text says, and as ONNX Runtime does; ONNX's reference divides by the largest size."""
    (got,) = fp.onnx.InferenceSession(model_of("Normalizer", {"norm": "MAX"}, {}), **OPTIONS).run(None, {"x": -X})
    np.testing.assert_allclose(got, -X / (-X).max(-1, keepdims=True), rtol=1e-6)


def test_probabilities_that_the_reference_gets_wrong_are_refused():
    attributes = {"prob_a": [1.0], "prob_b": [0.0], "classlabels_ints": [0, 1]}
    session = fp.onnx.InferenceSession(model_of("SVMClassifier", attributes, {}, 2), **OPTIONS)
    with pytest.raises(ImportModelError, match=r"SVMClassifier.*which ONNX's reference computes wrongly"):
        session.run(None, {"x": X})


def test_a_sequence_of_maps():
    """The default of scikit-learn's converter for the probabilities of classes."""
    node = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_strings=["a", "b"])
    maps = onnx.TypeProto()
    maps.sequence_type.elem_type.map_type.key_type = TensorProto.STRING
    maps.sequence_type.elem_type.map_type.value_type.tensor_type.elem_type = TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])],
        [helper.make_value_info("y", maps)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    session = fp.onnx.InferenceSession(helper.make_model(graph, ir_version=8, opset_imports=opsets), **OPTIONS)
    assert session.get_outputs()[0].type == "seq(map(string,tensor(float)))"
    (got,) = session.run(None, {"x": np.float32([[0.25, 0.75], [1, 0]])})
    assert got == [{"a": 0.25, "b": 0.75}, {"a": 1.0, "b": 0.0}]


def estimators() -> dict[str, tuple[Any, Any]]:
    from sklearn import (
        cluster,
        decomposition,
        discriminant_analysis,
        ensemble,
        linear_model,
        naive_bayes,
        neighbors,
        neural_network,
        preprocessing,
        svm,
        tree,
    )
    from sklearn.pipeline import make_pipeline

    kinds = (X[:, 0] + X[:, 1] * X[:, 2] > 0).astype(int) + (X[:, 3] > 1)
    numbers = X @ np.arange(6) + X[:, 0] ** 2
    lm, en = linear_model, ensemble
    regression = [
        lm.LinearRegression(), lm.Ridge(), lm.Lasso(alpha=0.1), lm.ElasticNet(alpha=0.1), lm.BayesianRidge(),
        tree.DecisionTreeRegressor(max_depth=5), en.RandomForestRegressor(n_estimators=10),
        en.GradientBoostingRegressor(n_estimators=10), svm.SVR(), svm.NuSVR(),
        neighbors.KNeighborsRegressor(n_neighbors=3),
    ]  # fmt: skip
    classification = [
        lm.LogisticRegression(), lm.SGDClassifier(loss="log_loss"), lm.RidgeClassifier(), svm.LinearSVC(), svm.SVC(),
        tree.DecisionTreeClassifier(max_depth=5), en.RandomForestClassifier(n_estimators=10),
        en.ExtraTreesClassifier(n_estimators=8), en.GradientBoostingClassifier(n_estimators=10),
        en.AdaBoostClassifier(n_estimators=5), en.BaggingClassifier(n_estimators=4),
        neighbors.KNeighborsClassifier(n_neighbors=3), naive_bayes.GaussianNB(), naive_bayes.BernoulliNB(),
        neural_network.MLPClassifier(hidden_layer_sizes=(16, 8), max_iter=50),
        discriminant_analysis.LinearDiscriminantAnalysis(), discriminant_analysis.QuadraticDiscriminantAnalysis(),
        make_pipeline(preprocessing.StandardScaler(), decomposition.PCA(n_components=3), lm.LogisticRegression()),
    ]  # fmt: skip
    others = [
        preprocessing.StandardScaler(), preprocessing.MinMaxScaler(), preprocessing.MaxAbsScaler(),
        preprocessing.RobustScaler(), preprocessing.Normalizer(), preprocessing.Binarizer(),
        preprocessing.PolynomialFeatures(degree=2), decomposition.PCA(n_components=3),
        decomposition.TruncatedSVD(n_components=3), cluster.KMeans(n_clusters=3), svm.OneClassSVM(),
    ]  # fmt: skip
    pairs = [*((m, numbers) for m in regression), *((m, kinds) for m in classification), *((m, None) for m in others)]
    return {type(model).__name__: (model, y) for model, y in pairs}


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_models_of_scikit_learn():
    runtime = pytest.importorskip("onnxruntime")
    convert = pytest.importorskip("skl2onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    done = 0
    for name, (estimator, y) in estimators().items():
        np.random.seed(0)
        estimator.fit(X, y) if y is not None else estimator.fit(X)
        classifies = hasattr(estimator, "predict_proba") or name == "RidgeClassifier" or name == "SVC"
        settings = {id(estimator): {"zipmap": False}} if classifies and "Pipeline" not in name else None
        settings = {"zipmap": False} if "Pipeline" in name else settings
        model = convert.to_onnx(estimator, X[:1], target_opset=18, options=settings)
        want = runtime.InferenceSession(model.SerializeToString(), options).run(None, {"X": X})
        for got, expected in zip(fp.onnx.InferenceSession(model, **OPTIONS).run(None, {"X": X}), want, strict=True):
            assert got.shape == expected.shape and got.dtype == expected.dtype, name
            assert np.abs(got - expected).max() <= 1e-4 * max(1, np.abs(expected).max()), name
        done += 1
    assert done >= 40
