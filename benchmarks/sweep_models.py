"""The networks of the sweep: of pytorchcv, of transformers, and of families that neither has. Weights are seeded.

Nobody tunes for these. Sizes are real where that takes seconds; large images and deep stacks are cut down.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import sweep_modules
from benchmarks.sweep_transformers import TRANSFORMERS, transformer

__all__ = ["NETWORKS"]

#: a module, its positional arguments and its keyword arguments
Network = tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]

#: pytorchcv: names by the size of the image
_ZOO = {
    (224, 224): """
        alexnet zfnet vgg11 bn_vgg11 bninception resnet10 resnet18 resnet34 resnet50b preresnet18 preresnet50
        resnext26_32x2d resnext50_32x4d seresnet18 seresnet50b sepreresnet18 seresnext50_32x4d senet16 resnestabc14
        resnesta18 ibn_resnet50 ibnb_resnet50 ibn_resnext50_32x4d ibn_densenet121 airnet50_1x64d_r2 airnext50_32x4d_r2
        bam_resnet18 cbam_resnet18 resattnet56 sknet50 scnet50 regnetx004 regnety004 diaresnet18 diapreresnet18
        diracnet18v2 sharesnet18 densenet169 condensenet74_c4_g4 sparsenet121 peleenet wrn50_2 drnc26 drnd22 dpn68
        darknet_ref darknet_tiny darknet19 darknet53 channelnet revnet38 irevnet301 bagnet9 dla34 dla46c dla60x
        fishnet99 espnetv2_w1 dicenet_w1 hrnet_w18_small_v1 vovnet27s selecsls42 hardnet39ds hardnet68 xdensenet121_2
        squeezenet_v1_1 squeezeresnet_v1_1 sqnxt23_w1 shufflenet_g3_w1 shufflenetv2b_w1 menet228_12x1_g3 mobilenet_w1
        mobilenetb_w1 fdmobilenet_w1 mobilenetv2b_w1 mobilenetv3_small_w1 mobilenetv3_large_w1 igcv3_w1 ghostnet
        mnasnet_b1 mnasnet_a1 darts proxylessnas_cpu proxylessnas_mobile fbnet_cb nasnet_4a1056 spnasnet
        efficientnet_b1 efficientnet_b0b efficientnet_edge_small_b mixnet_s isqrtcovresnet18 resneta18 resnetd50b
        octresnet10_ad2 tresnet_m msdnet22 pyramidnet101_a360
        """,
    (299, 299): "xception inceptionv4 inceptionresnetv1 inceptionresnetv2",
    (331, 331): "pnasnet5large polynet",
    (32, 32): """
        nin_cifar10 resnet20_cifar10 resnet164bn_cifar10 preresnet20_cifar10 seresnet20_cifar10 sepreresnet20_cifar10
        resnext20_32x2d_cifar10 pyramidnet110_a48_cifar10 densenet40_k12_cifar10 densenet100_k12_bc_cifar10
        xdensenet40_2_k24_bc_cifar10 wrn16_10_cifar10 wrn20_10_1bit_cifar10 ror3_56_cifar10 rir_cifar10
        resdropresnet20_cifar10 shakeshakeresnet20_2x16d_cifar10 shakedropresnet20_cifar10 fractalnet_cifar10
        diaresnet20_cifar10 msdnet22_cifar10
        """,
    (240, 240): "fcn8sd_resnetd50b_voc pspnet_resnetd50b_voc deeplabv3_resnetd50b_voc",
    (256, 512): """
        icnet_resnetd50b_cityscapes fastscnn_cityscapes cgnet_cityscapes dabnet_cityscapes sinet_cityscapes
        fpenet_cityscapes ctxnet_cityscapes lednet_cityscapes esnet_cityscapes edanet_cityscapes enet_cityscapes
        erfnet_cityscapes linknet_cityscapes segnet_cityscapes unet_cityscapes sqnet_cityscapes
        danet_resnetd50b_cityscapes
        """,
    (256, 256): """
        bisenet_resnet18_celebamaskhq simplepose_mobile_mobilenetv2b_w1_coco lwopenpose2d_mobilenet_cmupan_coco
        lwopenpose3d_mobilenet_cmupan_coco ibppose_coco centernet_resnet18_voc lffd20x5s320v2_widerface prnet
        """,
    (256, 192): "simplepose_resnet18_coco alphapose_fastseresnet101b_coco",
    (320, 240): "pfpcnet",
}
#: networks of pytorchcv that are told the size of the image
_SIZED = ("cityscapes", "voc", "celebamaskhq", "coco", "resnetd50b", "prnet", "pfpcnet", "widerface")
#: sizes that they have anyway
_NOT_SIZED = ("lwopenpose", "ibppose", "alphapose")


def _pytorchcv(name: str, **arguments: Any) -> nn.Module:
    """Make a network of pytorchcv, which is one function of one module; importing all would take torchvision too."""
    (folder,) = importlib.import_module("pytorchcv").__path__
    imports = ast.parse((Path(folder) / "model_provider.py").read_text(encoding="utf-8")).body
    (module,) = (
        node.module for node in imports if isinstance(node, ast.ImportFrom) and name in {a.name for a in node.names}
    )
    torch.manual_seed(0)
    return getattr(importlib.import_module(f"pytorchcv.{module}"), name)(**arguments)


def _zoo(name: str, size: tuple[int, int]) -> Network:
    sized = any(word in name for word in _SIZED) and not any(word in name for word in _NOT_SIZED) and size != (224, 224)
    module = _pytorchcv(name, **({"in_size": size} if sized else {}))
    first = next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
    return module, (_numbers(1, min(first.in_channels, 3), *size),), {}


def _own(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Network:
    torch.manual_seed(0)
    return make(), (_numbers(*shape),), {}


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


#: what makes each network, by name
NETWORKS: Mapping[str, Callable[[], Network]] = {
    **{name: partial(_zoo, name, size) for size, names in _ZOO.items() for name in names.split()},
    **{name: partial(transformer, name) for name in TRANSFORMERS},
    **{name: partial(_own, make, shape) for name, (make, shape) in sweep_modules.MODULES.items()},
}
