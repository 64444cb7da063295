"""The architectures of the built-in graphs, as plain PyTorch modules.

``ARCHITECTURES`` maps a graph's name to its :class:`Architecture`. The definitions use nothing but ``torch.nn``;
their weights come from :mod:`graphs.architectures.initialise`. This package is what graph files are made from and
checked against; nothing in the installed program needs it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fmtprop.ir.initialiser import Initialiser
from graphs.architectures import initialise
from graphs.architectures.bert import VOCABULARY, BertBase
from graphs.architectures.conv3d import Conv3dNet
from graphs.architectures.convnext import ConvNeXtT
from graphs.architectures.densenet import DenseNet121
from graphs.architectures.efficientnet import EfficientNetB0
from graphs.architectures.inception import InceptionV3
from graphs.architectures.mobilenet import MobileNetV2
from graphs.architectures.resnet import ResNet50
from graphs.architectures.shufflenet import ShuffleNetV2
from graphs.architectures.teaching import Chain, ConcatBlock, Residual
from graphs.architectures.unet import UNet
from graphs.architectures.vgg import VGG16
from graphs.architectures.vit import ViTB16

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True)
class Architecture:
    """One built-in architecture.

    >>> chain = ARCHITECTURES["chain"]
    >>> chain.module()(chain.example_input()).shape
    torch.Size([1, 32, 16, 16])
    """

    #: name of the graph, also the stem of its file
    name: str
    #: makes the module; its weights are torch's, not yet the seeded ones
    build: Callable[[], nn.Module]
    #: shape of the one input, batch 1: an image in plain (channels-first) order, or tokens
    input_shape: tuple[int, ...]
    description: str
    source: str
    #: number of learnable scalars
    parameter_count: int
    #: the input is int64 tokens below this number; 0 for an f32 image
    vocabulary: int = 0

    def module(self) -> nn.Module:
        """Build the module with its seeded weights, in inference mode.

        Result: a new module; two calls give equal weights.
        """
        with torch.device("meta"):  # torch's own initialisation would be thrown away, and takes seconds
            module = self.build()
        return initialise.apply(module.to_empty(device="cpu")).eval().requires_grad_(False)

    def example_input(self, seed: int | None = None) -> torch.Tensor:
        """Make a reproducible input: tokens drawn at random, or an image.

        An image has unit variance and structure at every scale: noise of one value per pixel would not do, pooling
        averages it away, and a deep network's output would hardly depend on it. Each octave therefore adds noise that
        is constant over blocks of half the size.

        `seed`: first of the consecutive seeds, one per octave; derived from the name if not given. Choose seeds at
        least 20 apart for independent inputs. Result: float32 or int64, of shape ``input_shape``.
        """
        first = zlib.crc32(self.name.encode()) if seed is None else seed
        if self.vocabulary:
            drawn = Initialiser.uniform(first, 0.0, self.vocabulary).materialise(self.input_shape)
            return torch.from_numpy(drawn.astype(np.int64))
        batch, channels, *extent = self.input_shape
        octaves = math.ceil(math.log2(max(extent))) + 1
        total = np.zeros(self.input_shape, np.float32)
        for octave in range(octaves):
            coarse = [min(1 << octave, size) for size in extent]
            noise = Initialiser.normal(first + octave, 0.0, octaves**-0.5).materialise((batch, channels, *coarse))
            for axis, (size, blocks) in enumerate(zip(extent, coarse, strict=True), start=2):
                noise = np.take(noise, np.arange(size) * blocks // size, axis)
            total += noise
        return torch.from_numpy(total)


_IMAGE = (1, 3, 224, 224)
_SMALL = (1, 3, 32, 32)

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "resnet50",
            ResNet50,
            _IMAGE,
            "ResNet-50 v1.5: bottleneck residual network",
            "He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385; v1.5 as in torchvision",
            25_557_032,
        ),
        Architecture(
            "mobilenet_v2",
            MobileNetV2,
            _IMAGE,
            "MobileNetV2 1.0: inverted residuals, depthwise convolutions",
            "Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, arXiv:1801.04381",
            3_504_872,
        ),
        Architecture(
            "vgg16",
            VGG16,
            _IMAGE,
            "VGG-16: plain stack of 3x3 convolutions, three large linear layers",
            "Simonyan and Zisserman, Very Deep Convolutional Networks, arXiv:1409.1556, configuration D",
            138_357_544,
        ),
        Architecture(
            "densenet121",
            DenseNet121,
            _IMAGE,
            "DenseNet-121: every layer concatenates all before it",
            "Huang et al., Densely Connected Convolutional Networks, arXiv:1608.06993",
            7_978_856,
        ),
        Architecture(
            "inception_v3",
            InceptionV3,
            (1, 3, 299, 299),
            "Inception v3: parallel branches, factorised convolutions, average pooling",
            "Szegedy et al., Rethinking the Inception Architecture, arXiv:1512.00567; without the auxiliary head",
            23_834_568,
        ),
        Architecture(
            "efficientnet_b0",
            EfficientNetB0,
            _IMAGE,
            "EfficientNet-B0: inverted residuals with squeeze-and-excitation and SiLU",
            "Tan and Le, EfficientNet: Rethinking Model Scaling, arXiv:1905.11946",
            5_288_548,
        ),
        Architecture(
            "shufflenet_v2",
            ShuffleNetV2,
            _IMAGE,
            "ShuffleNetV2 x1.0: channel split, concat and shuffle",
            "Ma et al., ShuffleNet V2: Practical Guidelines, arXiv:1807.11164",
            2_278_604,
        ),
        Architecture(
            "convnext_t",
            ConvNeXtT,
            _IMAGE,
            "ConvNeXt-T: depthwise 7x7, layer norm and linear layers in channels-last, GELU",
            "Liu et al., A ConvNet for the 2020s, arXiv:2201.03545",
            28_589_128,
        ),
        Architecture(
            "bert_base",
            BertBase,
            (1, 128),
            "BERT-base: encoder over 128 tokens, norm after each residual",
            "Devlin et al., BERT, arXiv:1810.04805; without the pooler",
            108_891_648,
            VOCABULARY,
        ),
        Architecture(
            "vit_b16",
            ViTB16,
            _IMAGE,
            "ViT-B/16: an image as 196 tokens, norm before each branch",
            "Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv:2010.11929; as in torchvision",
            86_567_656,
        ),
        Architecture(
            "unet",
            UNet,
            (1, 3, 256, 256),
            "U-Net: encoder and decoder with transposed convolutions and skip concats",
            "Ronneberger et al., U-Net, arXiv:1505.04597; batch normalization and width 32 as in Buda et al., "
            "arXiv:1906.03720",
            7_763_041,
        ),
        Architecture(
            "conv3d",
            Conv3dNet,
            (1, 3, 16, 112, 112),
            "A small 3-D residual network over 16 frames",
            "This project's own, in the manner of R3D: Tran et al., A Closer Look at Spatiotemporal Convolutions, "
            "arXiv:1711.11248",
            3_701_744,
        ),
        Architecture(
            "chain",
            Chain,
            _SMALL,
            "Teaching graph: convolution, ReLU, max pooling",
            "oneDNN developer guide, Memory Format Propagation",
            896,
        ),
        Architecture(
            "residual",
            Residual,
            _SMALL,
            "Teaching graph: a residual block",
            "This project's own",
            19_488,
        ),
        Architecture(
            "concat",
            ConcatBlock,
            _SMALL,
            "Teaching graph: three branches and a concat",
            "This project's own",
            9_544,
        ),
    )
}
