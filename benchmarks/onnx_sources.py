"""Make ONNX files of many kinds of models by the tools that people use, each with inputs to try it on.

``python -m benchmarks.onnx_sources FOLDER`` writes ``NAME.onnx`` and ``NAME.npz`` for each model of :data:`SOURCES`.
The inputs of call 0 are in the archive under ``0/INPUT``, and so on. Weights are seeded. A converter's package is
imported when its first model is made: torchvision, skl2onnx, onnxmltools with lightgbm and xgboost, tensorflow with
tf2onnx.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

__all__ = ["SOURCES", "main"]

Feed = dict[str, Any]
#: writes a model to a path, and returns the inputs of its calls
Maker = Callable[[Path], list[Feed]]

#: networks of the sweep by exporter: one call, or several with other sizes of a dynamic axis
_TORCHSCRIPT = """
    resnet18 mobilenetv2b_w1 mobilenetv3_large_w1 efficientnet_b0b densenet169 shufflenetv2b_w1 squeezenet_v1_1
    inceptionv4 nasnet_4a1056 octresnet10_ad2 isqrtcovresnet18 cbam_resnet18 bam_resnet18 dpn68 hardnet39ds irevnet301
    unet_cityscapes icnet_resnetd50b_cityscapes deeplabv3_resnetd50b_voc danet_resnetd50b_cityscapes
    centernet_resnet18_voc lwopenpose2d_mobilenet_cmupan_coco lffd20x5s320v2_widerface yolo convmixer nafnet edsr
    esrgan cyclegan unet_3d r2plus1d conv_tasnet wavenet pointnet crnn deep_cross fpn convnext hf_resnet mobilevit
    segformer
    """.split()
_DYNAMO = """
    resnet18 mobilenetv2b_w1 mobilenetv3_small_w1 efficientnet_b1 hrnet_w18_small_v1 dla34 ghostnet regnetx004
    selecsls42 mixnet_s fishnet99 ibppose_coco yolo nafnet unet_3d conv_tasnet detr crnn latent_autoencoder mlp_mixer
    bert roberta distilbert albert electra deberta_v2 mpnet mobilebert squeezebert convbert roformer modernbert funnel
    xlnet gpt2 gpt_neo gpt_neox opt bloom llama mistral qwen2 qwen3 gemma2 phi stablelm mixtral mamba t5 bart pegasus
    whisper wav2vec2 hubert wavlm sew audio_spectrogram encodec univnet vit deit beit dinov2 swin swinv2 hiera
    convnextv2 bit mobilevitv2 hf_efficientnet poolformer levit cvt pvt_v2 focalnet swiftformer hgnet_v2 textnet dpt
    glpn yolos vitdet clip_vision clip_text siglip_vision swin2sr superpoint videomae perceiver patchtst
    """.split()
#: networks with dynamic axes, by axis of their first input and the sizes of its calls
_DYNAMIC = {
    "resnet18": (0, (1, 3)), "mobilenetv3_small_w1": (0, (1, 2)), "unet_cityscapes": (3, (512, 256)),
    "wavenet": (2, (4000, 1777)),
    "edsr": (2, (96, 33)), "pointnet": (2, (1024, 300)), "bert": (1, (128, 17)), "gpt2": (1, (128, 5)),
    "llama": (1, (128, 31)), "wav2vec2": (1, (16000, 8000)), "vit": (0, (1, 2)), "distilbert": (1, (128, 9)),
}  # fmt: skip
#: float networks, with the forms of ONNX Runtime's quantiser that are made of them
_QUANTISED = {
    "resnet18": ("dynamic", "qdq", "qoperator"), "mobilenetv2b_w1": ("qdq", "qoperator"), "squeezenet_v1_1": ("qdq",),
    "bert": ("dynamic",), "gpt2": ("dynamic", "blocks"), "vit": ("dynamic", "qdq"), "crnn": ("dynamic",),
    "llama": ("blocks",),
}  # fmt: skip
#: their names
_FORMS = {"dynamic": "int8", "qdq": "qdq", "qoperator": "qoperator", "blocks": "int4"}
#: networks of PyTorch's older exporter by the opsets to which onnx.version_converter takes them
_VERSIONS = {"resnet18": (8, 13, 21), "mobilenetv3_large_w1": (13, 23), "crnn": (15, 22), "deep_cross": (7, 25)}
#: networks whose weights are 16-bit floats
_HALVES = {
    "resnet18": "float16",
    "bert": "float16",
    "mobilenetv2b_w1": "float16",
    "vit": "bfloat16",
    "gpt2": "bfloat16",
}
#: detectors of torchvision
_DETECTORS = """
    ssdlite320_mobilenet_v3_large retinanet_resnet50_fpn fcos_resnet50_fpn fasterrcnn_mobilenet_v3_large_320_fpn
    """.split()


# ---------------------------------------------------------------- PyTorch


def _network(name: str) -> tuple[Any, Feed]:
    """Return a module that returns tensors only, and its inputs by name."""
    import torch

    from benchmarks.sweep_models import NETWORKS

    module, args, kwargs = NETWORKS[name]()

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module.eval().requires_grad_(False)

        def forward(self, *values: Any) -> Any:
            given = dict(zip(kwargs, values[len(args) :], strict=True))
            return [leaf for leaf in _tensors(self.module(*values[: len(args)], **given)) if leaf is not None]

    feed = {f"input_{index}": value for index, value in enumerate(args)} | kwargs
    return Plain().eval(), feed


def _tensors(result: Any) -> list[Any]:
    import torch

    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, list | tuple) else ()
    return [leaf for value in values for leaf in _tensors(value)]


def _export(path: Path, module: Any, feed: Mapping[str, Any], **options: Any) -> list[Feed]:
    import torch

    dynamo = options.setdefault("dynamo", False)
    if dynamo:
        options |= {"external_data": False, "verbose": False}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, tuple(feed.values()), str(path), input_names=list(feed), **options)
    return [{name: _array(value) for name, value in feed.items()}]


def _array(value: Any) -> Any:
    import torch

    if value.dtype is torch.bfloat16:
        import ml_dtypes

        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def exported(name: str, path: Path, **options: Any) -> list[Feed]:
    """Export a network of the sweep."""
    module, feed = _network(name)
    return _export(path, module, feed, **options)


def dynamic(name: str, path: Path) -> list[Feed]:
    """Export a network with a dynamic axis, and call it with several sizes."""
    axis, sizes = _DYNAMIC[name]
    module, feed = _network(name)
    # PyTorch's older exporter takes dynamic axes of convolutional networks, the newer one of transformers
    older = len(feed) == 1 and next(iter(feed.values())).is_floating_point() and name not in ("wav2vec2", "vit")
    axes = {key: {axis: "size"} for key in feed}
    if older:
        _export(path, module, feed, dynamic_axes=axes)
    else:
        import torch

        given = tuple({axis: torch.export.Dim.DYNAMIC} for _ in feed)
        longer = {key: _resized(value, axis, max(sizes[0], 2)) for key, value in feed.items()}
        _export(path, module, longer, dynamo=True, dynamic_shapes={"values": given})
    return [{key: _resized(value, axis, size).numpy() for key, value in feed.items()} for size in sizes]


def _resized(value: Any, axis: int, size: int) -> Any:
    import torch

    repeats = -(-size // value.shape[axis])
    return torch.cat([value] * repeats, axis).narrow(axis, 0, size).contiguous()


def halved(name: str, path: Path) -> list[Feed]:
    """Export a network with 16-bit weights."""
    import torch

    module, feed = _network(name)
    dtype = getattr(torch, _HALVES[name])
    feed = {key: value.to(dtype) if value.is_floating_point() else value for key, value in feed.items()}
    return _export(path, module.to(dtype), feed, dynamo=True)


def quantised(name: str, form: str, path: Path) -> list[Feed]:
    """Quantise an exported network with ONNX Runtime's quantiser."""
    from onnxruntime import quantization

    floats = path.with_suffix(".floats")
    feeds = exported(name, floats, dynamo=name not in _TORCHSCRIPT, opset_version=18)
    try:
        if form == "dynamic":
            quantization.quantize_dynamic(floats, path)
        elif form == "blocks":
            from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

            quantizer = MatMulNBitsQuantizer(str(floats), block_size=32)
            quantizer.process()
            quantizer.model.save_model_to_file(str(path))
        else:
            made = {"qdq": quantization.QuantFormat.QDQ, "qoperator": quantization.QuantFormat.QOperator}[form]
            quantization.quantize_static(floats, path, _Data(feeds), quant_format=made, per_channel=form == "qdq")
    finally:
        floats.unlink()
    return feeds


class _Data:
    """Calibration data."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.left = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self.left, None)


def converted(name: str, version: int, path: Path) -> list[Feed]:
    """Take an exported network to another opset."""
    feeds = exported(name, path, opset_version=max(9, min(version, 17)))
    onnx.save(onnx.version_converter.convert_version(onnx.load(path), version), path)
    return feeds


def external(name: str, path: Path) -> list[Feed]:
    """Export a network with its weights in a second file."""
    feeds = exported(name, path)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location=f"{path.stem}.data", size_threshold=0)
    return feeds


def optimised(name: str, path: Path) -> list[Feed]:
    """Save a network as ONNX Runtime's optimiser leaves it: with fused operators of its own."""
    import onnxruntime

    plain = path.with_suffix(".plain")
    feeds = exported(name, plain, dynamo=name not in _TORCHSCRIPT)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
    plain.unlink()
    return feeds


def detector(name: str, path: Path) -> list[Feed]:
    """Export a detector of torchvision with its suppression of overlapping boxes."""
    import torch

    torch.manual_seed(0)
    made = importlib.import_module("torchvision").models.detection
    module = getattr(made, name)(weights=None, weights_backbone=None).eval().requires_grad_(False)

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, image: Any) -> Any:
            found = self.module([image])[0]
            return found["boxes"], found["scores"], found["labels"]

    image = torch.rand(3, 320, 320, generator=torch.Generator().manual_seed(1))
    return _export(path, First().eval(), {"image": image}, opset_version=17)


# ---------------------------------------------------------------- scikit-learn and its neighbours

_RNG = np.random.default_rng(0)
_ROWS = _RNG.standard_normal((200, 6)).astype(np.float32)
_KINDS = (_ROWS[:, 0] + _ROWS[:, 1] * _ROWS[:, 2] > 0).astype(int) + (_ROWS[:, 3] > 1)
_NUMBERS = (_ROWS @ np.arange(6) + _ROWS[:, 0] ** 2).astype(np.float32)

#: estimators by name: module, class, its arguments, what it learns
_ESTIMATORS: Mapping[str, tuple[str, str, Mapping[str, Any], Any]] = {
    "sklearn_forest": ("ensemble", "RandomForestClassifier", {"n_estimators": 20}, _KINDS),
    "sklearn_extra_trees": ("ensemble", "ExtraTreesRegressor", {"n_estimators": 10}, _NUMBERS),
    "sklearn_hist_boosting": ("ensemble", "HistGradientBoostingRegressor", {"max_iter": 20}, _NUMBERS),
    "sklearn_hist_boosting_classes": ("ensemble", "HistGradientBoostingClassifier", {"max_iter": 10}, _KINDS),
    "sklearn_boosting": ("ensemble", "GradientBoostingClassifier", {"n_estimators": 10}, _KINDS),
    "sklearn_isolation": ("ensemble", "IsolationForest", {"n_estimators": 10}, None),
    "sklearn_mlp": ("neural_network", "MLPRegressor", {"hidden_layer_sizes": (32, 16), "max_iter": 40}, _NUMBERS),
    "sklearn_svr": ("svm", "NuSVR", {}, _NUMBERS),
    "sklearn_neighbours": ("neighbors", "KNeighborsClassifier", {"n_neighbors": 5}, _KINDS),
    "sklearn_neighbours_mean": ("neighbors", "KNeighborsRegressor", {"weights": "distance"}, _NUMBERS),
    "sklearn_gaussian_process": ("gaussian_process", "GaussianProcessRegressor", {}, _NUMBERS),
    "sklearn_mixture": ("mixture", "GaussianMixture", {"n_components": 3}, None),
    "sklearn_kmeans": ("cluster", "MiniBatchKMeans", {"n_clusters": 4}, None),
    "sklearn_bins": ("preprocessing", "KBinsDiscretizer", {"encode": "ordinal"}, None),
    "sklearn_powers": ("preprocessing", "PowerTransformer", {}, None),
    "sklearn_multinomial": ("linear_model", "LogisticRegression", {}, _KINDS),
    "sklearn_poisson": ("linear_model", "TweedieRegressor", {"power": 0}, _NUMBERS),
}


def estimator(name: str, path: Path) -> list[Feed]:
    """Convert an estimator of scikit-learn."""
    module, cls, arguments, target = _ESTIMATORS[name]
    np.random.seed(0)
    model = getattr(importlib.import_module(f"sklearn.{module}"), cls)(**arguments)
    model.fit(_ROWS, target) if target is not None else model.fit(_ROWS)
    classes = target is _KINDS
    return _converted(path, model, {id(model): {"zipmap": False}} if classes else None)


def _converted(path: Path, model: Any, options: Any = None) -> list[Feed]:
    convert = importlib.import_module("skl2onnx")
    onnx.save(convert.to_onnx(model, _ROWS[:1], target_opset={"": 18, "ai.onnx.ml": 3}, options=options), path)
    return [{"X": _ROWS}, {"X": _ROWS[:7]}]


def table_of_texts(path: Path) -> list[Feed]:
    """Convert a pipeline over texts."""
    names = ("sklearn.pipeline", "sklearn.preprocessing", "sklearn.linear_model", "skl2onnx")
    pipeline, preprocessing, linear_model, convert = map(importlib.import_module, names)
    types = importlib.import_module("skl2onnx.common.data_types")
    texts = _RNG.choice(["a", "b", "c"], (200, 1)).astype(object)
    encoder = preprocessing.OneHotEncoder(handle_unknown="ignore")
    model = pipeline.make_pipeline(encoder, linear_model.LogisticRegression()).fit(texts, _KINDS)
    made = convert.convert_sklearn(
        model, initial_types=[("text", types.StringTensorType([None, 1]))], options={"zipmap": False}, target_opset=18
    )
    onnx.save(made, path)
    return [{"text": texts}, {"text": np.array([["c"], ["unseen"]], object)}]


def with_zipmap(path: Path) -> list[Feed]:
    """Convert a classifier with its default output: a sequence of maps."""
    model = importlib.import_module("sklearn.linear_model").LogisticRegression().fit(_ROWS, _KINDS)
    return _converted(path, model)


def boosted(package: str, path: Path) -> list[Feed]:
    """Convert trees of LightGBM or of XGBoost."""
    tools = importlib.import_module("onnxmltools")
    types = importlib.import_module("onnxmltools.convert.common.data_types")
    kinds = [("X", types.FloatTensorType([None, 6]))]
    if package == "lightgbm":
        model = importlib.import_module("lightgbm").LGBMRegressor(n_estimators=20, verbose=-1).fit(_ROWS, _NUMBERS)
        made = tools.convert_lightgbm(model, initial_types=kinds, target_opset=15)
    else:
        model = importlib.import_module("xgboost").XGBClassifier(n_estimators=10).fit(_ROWS, _KINDS)
        made = tools.convert_xgboost(model, initial_types=kinds, target_opset=15)
    onnx.save(made, path)
    return [{"X": _ROWS}, {"X": _ROWS[:7]}]


# ---------------------------------------------------------------- TensorFlow

#: Keras applications by the size of their images
_KERAS = {
    "MobileNetV3Small": 224, "EfficientNetB0": 224, "NASNetMobile": 224, "ConvNeXtTiny": 224, "DenseNet121": 224,
    "Xception": 299, "ResNet50V2": 224, "EfficientNetV2B0": 224,
}  # fmt: skip


def keras(name: str, path: Path) -> list[Feed]:
    """Convert an application of Keras, whose images have their channels last."""
    tensorflow = _tensorflow()
    size = _KERAS[name]
    model = getattr(tensorflow.keras.applications, name)(weights=None, input_shape=(size, size, 3))
    image = _RNG.random((2, size, size, 3), np.float32)
    return _from_tensorflow(path, lambda x: model(x, training=False), [image], [None, size, size, 3])


def _tensorflow() -> Any:
    tensorflow = importlib.import_module("tensorflow")
    tensorflow.keras.utils.set_random_seed(0)
    return tensorflow


def _from_tensorflow(path: Path, function: Any, calls: Sequence[Any], shape: Sequence[int | None]) -> list[Feed]:
    tensorflow, tf2onnx = importlib.import_module("tensorflow"), importlib.import_module("tf2onnx")
    spec = tensorflow.TensorSpec(shape, calls[0].dtype, name="x")
    made, _ = tf2onnx.convert.from_function(tensorflow.function(function), input_signature=[spec], opset=17)
    onnx.save(made, path)
    return [{"x": call} for call in calls]


def keras_text(path: Path) -> list[Feed]:
    """Convert an embedding, a bidirectional LSTM, a GRU and attention."""
    layers = (tensorflow := _tensorflow()).keras.layers
    ids = layers.Input((None,), dtype="int32")
    x = layers.Embedding(100, 32)(ids)
    x = layers.Bidirectional(layers.LSTM(24, return_sequences=True))(x)
    x = layers.GRU(32, return_sequences=True)(x)
    x = layers.MultiHeadAttention(4, 8)(x, x)
    x = layers.LayerNormalization()(x)
    model = tensorflow.keras.Model(ids, layers.Dense(5, activation="softmax")(layers.GlobalMaxPooling1D()(x)))
    calls = [_RNG.integers(0, 100, (2, length)).astype(np.int32) for length in (12, 5)]
    return _from_tensorflow(path, lambda x: model(x, training=False), calls, [None, None])


def tensorflow_loop(path: Path) -> list[Feed]:
    """Convert a loop whose number of rounds depends on the data, with a branch in it."""
    tf = _tensorflow()

    def function(x: Any) -> Any:
        def body(count: Any, y: Any) -> Any:
            return count + 1, tf.cond(tf.reduce_sum(y) > 3.0, lambda: y * 0.5, lambda: y + 1.0)

        return tf.while_loop(lambda count, y: count < tf.shape(x)[0], body, (0, x))[1]

    return _from_tensorflow(path, function, [np.ones((5, 3), np.float32), np.ones((2, 3), np.float32)], [None, 3])


def tensorflow_boxes(path: Path) -> list[Feed]:
    """Convert resizing, cropping and a suppression of overlapping boxes."""
    tf = _tensorflow()

    def function(x: Any) -> Any:
        image = tf.image.resize(x, [40, 30], method="bilinear")
        corners = tf.reshape(tf.reduce_mean(image, -1), [-1, 2])[:100]
        boxes = tf.concat([corners, corners + 0.2], -1)
        kept = tf.image.non_max_suppression(boxes, tf.reduce_sum(corners, -1), 10, 0.5)
        return tf.gather(boxes, kept)

    return _from_tensorflow(path, function, [_RNG.random((1, 20, 20, 3), np.float32)], [1, 20, 20, 3])


# ---------------------------------------------------------------- the list


def _sources() -> dict[str, Maker]:
    found: dict[str, Maker] = {f"torchscript_{name}": partial(exported, name) for name in _TORCHSCRIPT}
    found |= {f"dynamo_{name}": partial(exported, name, dynamo=True) for name in _DYNAMO}
    found |= {f"dynamic_{name}": partial(dynamic, name) for name in _DYNAMIC}
    found |= {f"{_HALVES[name]}_{name}": partial(halved, name) for name in _HALVES}
    found |= {
        f"{_FORMS[form]}_{name}": partial(quantised, name, form) for name, forms in _QUANTISED.items() for form in forms
    }
    found |= {
        f"opset{version}_{name}": partial(converted, name, version)
        for name, versions in _VERSIONS.items()
        for version in versions
    }
    found |= {f"external_{name}": partial(external, name) for name in ("resnet18", "deep_cross")}
    found |= {f"optimised_{name}": partial(optimised, name) for name in ("resnet18", "bert", "gpt2", "vit")}
    found |= {name: partial(detector, name) for name in _DETECTORS}
    found |= {name: partial(estimator, name) for name in _ESTIMATORS}
    found |= {"sklearn_text": table_of_texts, "sklearn_zipmap": with_zipmap}
    found |= {package: partial(boosted, package) for package in ("lightgbm", "xgboost")}
    found |= {f"keras_{name}": partial(keras, name) for name in _KERAS}
    return found | {"keras_text": keras_text, "tensorflow_loop": tensorflow_loop, "tensorflow_boxes": tensorflow_boxes}


#: what makes each file, by name
SOURCES: Mapping[str, Maker] = _sources()


def main(arguments: Sequence[str] | None = None) -> int:
    """Make files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.onnx_sources", description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in (name for name in SOURCES if any(fnmatch(name, pattern) for pattern in given.only)):
        path = given.folder / f"{name}.onnx"
        if path.with_suffix(".npz").exists():
            continue
        try:
            feeds = SOURCES[name](path)
        except Exception as error:
            path.unlink(missing_ok=True)
            print(f"{name}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}", flush=True)
            continue
        inputs = {f"{index}/{name}": value for index, feed in enumerate(feeds) for name, value in feed.items()}
        np.savez(path.with_suffix(".npz"), **inputs)
        print(f"{name}: {path.stat().st_size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
