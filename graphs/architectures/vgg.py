"""VGG-16 (configuration D, without batch normalization)."""

from __future__ import annotations

from torch import nn

# convolutions and channels of each stage; a 2x2 max pooling ends it
STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))


class VGG16(nn.Sequential):
    """Thirteen 3x3 convolutions and three linear layers."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        src = 3
        for repeats, dst in STAGES:
            for _ in range(repeats):
                layers += [nn.Conv2d(src, dst, 3, padding=1), nn.ReLU()]
                src = dst
            layers.append(nn.MaxPool2d(2, 2))
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.flatten = nn.Flatten(1)
        self.head = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, 1000),
        )
