"""Contenders with PyTorch: the same models, plain and in the loop of Accelerate."""

import accelerate
import numpy as np
import torch
import workloads
from torch import nn


def versions():
    return {"PyTorch": torch.__version__, "Accelerate": accelerate.__version__}


def training(description):
    return Training(**description["options"])


class Cnn(nn.Sequential):
    def __init__(self):
        channels = [3, *(filters for filters, _ in workloads.CNN_LAYERS)]
        parts = []
        for before, (filters, strides) in zip(channels, workloads.CNN_LAYERS):
            parts += [nn.Conv2d(before, filters, 3, strides, padding=1), nn.ReLU()]
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


class Mlp(nn.Sequential):
    def __init__(self):
        widths = workloads.MLP_WIDTHS
        parts = []
        for before, after in zip(widths, widths[1:]):
            parts += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*parts[:-1])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, workloads.LAYER_NORM_EPSILON) for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(width, workloads.HEADS, batch_first=True)
        self.transform = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        normal = self.norms[0](x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        return x + self.transform(self.norms[1](x))


class Transformer(nn.Sequential):
    def __init__(self, layers, width, vocabulary):
        blocks = [Block(width) for _ in range(layers)]
        super().__init__(nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary))


def build(name):
    if name == "cnn":
        return Cnn()
    return Mlp() if name == "mlp" else Transformer(**workloads.TRANSFORMERS[name])


def data(name, examples):
    x, y = (torch.from_numpy(np.ascontiguousarray(t)) for t in workloads.data(name, examples))
    if name == "cnn":
        # Channels come second, but stay last in memory, which is the faster of the two here.
        x = x.permute(0, 3, 1, 2)
    return x, y.long()


class Training:
    """step() makes one update from micro-batches; from one, where the batch is plain."""

    def __init__(self, model, batch, micro_batches=1, jit_compile=False):
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(
            gradient_accumulation_steps=micro_batches, cpu=True
        )
        built = build(model)
        optimizer = torch.optim.Adam(
            built.parameters(), workloads.LEARNING_RATE, eps=workloads.ADAM_EPSILON
        )
        self.model, self.optimizer = self.accelerator.prepare(built, optimizer)
        self.forward = torch.compile(self.model) if jit_compile else self.model
        x, y = data(model, batch)
        self.parts = list(zip(x.chunk(micro_batches), y.chunk(micro_batches)))

    def step(self):
        for x, y in self.parts:
            with self.accelerator.accumulate(self.model):
                logits = self.forward(x)
                loss = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
