"""Common models in plain torch, and for three of them a batch of random data.

`build` returns full sizes for a GPU, or tiny ones for a test on a CPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Task = tuple[nn.Module, Tensor, Tensor]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix x (batch, seq, width) along seq."""
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return mixed


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Refine x (batch, seq, width)."""
        x = x + self.attention(self.norm1(x))
        refined: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return refined


class Gpt(nn.Module):
    """A decoder-only language model whose embedding is also its head."""

    def __init__(self, vocabulary: int, seq: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(seq, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch * seq, vocabulary)."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)


class GptWithLoss(nn.Module):
    """The same model with the loss in its forward, as in nanoGPT."""

    def __init__(self, vocabulary: int, seq: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.gpt = Gpt(vocabulary, seq, layers, width, heads)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (batch * seq, vocabulary) and the loss."""
        logits: Tensor = self.gpt(tokens)
        return logits, functional.cross_entropy(logits, targets.flatten())


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions."""

    expansion = 1

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Refine x (batch, channels, height, width)."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, with the stride in the middle one."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.first = convolution(inputs, width, 1)
        self.second = convolution(width, width, 3, stride)
        self.third = convolution(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Refine x (batch, channels, height, width)."""
        y = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.relu(self.third(y) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet.

    Of width 64, depths (3, 4, 6, 3) are ResNet-50, and (2, 2, 2, 2) of `BasicBlock` ResNet-18.
    """

    def __init__(
        self,
        depths: tuple[int, ...],
        width: int,
        classes: int,
        block: type[Bottleneck | BasicBlock] = Bottleneck,
    ) -> None:
        super().__init__()
        self.stem = convolution(3, width, 7, 2)
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(block(channels, width << stage, stride))
                channels = block.expansion * (width << stage)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        x = functional.max_pool2d(torch.relu(self.stem(x)), 3, 2, padding=1)
        logits: Tensor = self.head(self.blocks(x).mean(dim=(2, 3)))
        return logits


class CifarNet(nn.Module):
    """ResNet for images of 32 by 32; three stages of one block are ResNet-8."""

    def __init__(self, width: int = 16, blocks: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.stem = convolution(3, width, 3)
        layers, channels = [], width
        for stage in range(3):
            for number in range(blocks):
                outputs = width << stage
                layers.append(BasicBlock(channels, outputs, 2 if stage and not number else 1))
                channels = outputs
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        x = self.blocks(torch.relu(self.stem(x)))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions with batch norm."""
    return nn.Sequential(
        *(convolution(inputs, outputs, 3), nn.ReLU(inplace=True)),
        *(convolution(outputs, outputs, 3), nn.ReLU(inplace=True)),
    )


class UNet(nn.Module):
    """A U-Net for segmentation."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.downs = nn.ModuleList(map(double, [3, *widths[:-2]], widths[:-1]))
        self.bottom = double(widths[-2], widths[-1])
        pairs = list(zip(widths[1:], widths[:-1], strict=True))[::-1]
        self.rises = nn.ModuleList(nn.ConvTranspose2d(big, small, 2, 2) for big, small in pairs)
        self.ups = nn.ModuleList(double(big, small) for big, small in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes, height, width)."""
        kept = []
        for down in self.downs:
            x = down(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for rise, up in zip(self.rises, self.ups, strict=True):
            x = up(torch.cat([kept.pop(), rise(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def gpt(tiny: bool, batch: int) -> Task:
    """Return a GPT of 124 million parameters over 1024 tokens."""
    vocabulary, seq, layers = (256, 32, 2) if tiny else (50304, 1024, 12)
    width, heads = (64, 4) if tiny else (768, 12)
    tokens = torch.randint(vocabulary, (batch, seq + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    return Gpt(vocabulary, seq, layers, width, heads), inputs, targets


def resnet50(tiny: bool, batch: int) -> Task:
    """Return ResNet-50 and images of 224 by 224."""
    depths, width, classes = ((1, 1, 1, 1), 8, 10) if tiny else ((3, 4, 6, 3), 64, 1000)
    pixels = 64 if tiny else 224
    images = torch.randn(batch, 3, pixels, pixels)
    return ResNet(depths, width, classes), images, torch.randint(classes, (batch,))


def unet(tiny: bool, batch: int) -> Task:
    """Return a U-Net of five levels and images of 512 by 512."""
    width, depth, classes = (8, 2, 4) if tiny else (64, 4, 21)
    pixels = 32 if tiny else 512
    images = torch.randn(batch, 3, pixels, pixels)
    return UNet(width, depth, classes), images, torch.randint(classes, (batch, pixels, pixels))


MODELS: dict[str, Callable[[bool, int], Task]] = {"gpt": gpt, "resnet50": resnet50, "unet": unet}


def build(name: str, device: str, tiny: bool, batch: int) -> Task:
    """Return a model on the device, and inputs and targets on the host, as a loader has them.

    They are the same in every process.
    """
    torch.manual_seed(0)
    model, inputs, targets = MODELS[name](tiny, batch)
    return model.to(device), inputs, targets
