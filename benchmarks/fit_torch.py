"""Loops on torch that are written by hand, and the models of `benchmarks/fit.py` in plain modules."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.fit_models import BATCH, CHANNELS, CLASSES, FEATURES, HEADS, LENGTH, VOCABULARY, WIDTHS, Parts


def data_parallel(model: nn.Module, family: str, x: np.ndarray, y: np.ndarray) -> Callable[[], object]:
    """DistributedDataParallel: each rank with its rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrapped = nn.parallel.DistributedDataParallel(model)
    own = BATCH[family] // ranks
    rows = np.concatenate([np.arange(at, at + own) for at in range(rank * own, len(x), BATCH[family])])
    return _loop(wrapped, x[rows], y[rows], own)


def tensor_parallel(
    make: Callable[[Parts], nn.Module], family: str, x: np.ndarray, y: np.ndarray
) -> Callable[[], object]:
    """Column and row parallel layers with explicit collectives: each rank has all rows and its part of the layers."""
    return _loop(make(Parts(dist.get_world_size(), _Enter(), _Leave())), x, y, BATCH[family])


def _loop(model: nn.Module, x: np.ndarray, y: np.ndarray, batch: int) -> Callable[[], object]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    inputs, labels = torch.tensor(x), torch.tensor(y).long()
    # Keras's layers do not ask whether a module is in training mode: statistics would be those of inference
    is_keras = isinstance(getattr(model, "module", model), keras.Model)
    mode = {"training": True} if is_keras else {}

    def epoch() -> object:
        model.train()
        for start in range(0, len(inputs), batch):
            optimizer.zero_grad()
            logits = model(inputs[start : start + batch], **mode)
            loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels[start : start + batch].flatten())
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    return epoch


class StatisticsOfAllRows(keras.layers.BatchNormalization):
    """As one device has it: DistributedDataParallel takes each rank's own, and so trains another model."""

    def _moments(self, inputs: torch.Tensor, mask: object) -> tuple[torch.Tensor, torch.Tensor]:
        axes = self._reduction_axes
        sums = torch.cat([inputs.sum(axes), (inputs * inputs).sum(axes)])
        count = inputs.numel() // inputs.shape[self.axis] * dist.get_world_size()
        mean, square = (_Copy.apply(_Sum.apply(sums)) / count).chunk(2)
        return mean, square - mean * mean


class _Copy(torch.autograd.Function):
    """Identity; gradients are added over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    """Values are added over ranks; gradients pass."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Enter(keras.layers.Layer):
    """Where the column-parallel layers begin."""

    def call(self, x):
        return x if x.device.type == "meta" else _Copy.apply(x)

    def compute_output_shape(self, shape):
        return shape


class _Leave(keras.layers.Layer):
    """Where the row-parallel layers end."""

    def call(self, x):
        return x if x.device.type == "meta" else _Sum.apply(x)

    def compute_output_shape(self, shape):
        return shape


def plain_module(family: str, size: float, parts: Parts) -> nn.Module:
    """The model of this family without Keras."""
    torch.manual_seed(0)
    enter, leave = (lambda x: x, lambda x: x) if parts.number == 1 else (_Copy.apply, _Sum.apply)
    width = WIDTHS[family][size]
    return {"mlp": _Mlp, "cnn": _Cnn, "transformer": _Transformer}[family](width, parts.number, enter, leave)


class _Mlp(nn.Module):
    def __init__(self, width: int, parts: int, enter, leave):
        super().__init__()
        self.stem, self.up = nn.Linear(FEATURES, width), nn.Linear(width, 4 * width // parts)
        self.down, self.logits = nn.Linear(4 * width // parts, width, bias=False), nn.Linear(width, CLASSES)
        self.enter, self.leave = enter, leave

    def forward(self, x):
        x = self.enter(self.stem(x).relu())
        return self.logits(self.leave(self.down(self.up(x).relu())).relu())


class _Cnn(nn.Module):
    def __init__(self, width: int, parts: int, enter, leave):
        super().__init__()
        wide = 4 * width // parts
        self.stem, self.up = nn.Conv2d(CHANNELS, width, 3, padding=1), nn.Conv2d(width, wide, 3, padding=1, bias=False)
        self.norm, self.down = nn.BatchNorm2d(wide), nn.Conv2d(wide, width, 3, padding=1, bias=False)
        self.logits, self.enter, self.leave = nn.Linear(width, CLASSES), enter, leave

    def forward(self, x):
        x = nn.functional.max_pool2d(self.stem(x.permute(0, 3, 1, 2)).relu(), 4)
        x = self.down(self.norm(self.up(self.enter(x))).relu())
        return self.logits(self.leave(x).relu().mean((2, 3)))


class _Transformer(nn.Module):
    def __init__(self, width: int, parts: int, enter, leave):
        super().__init__()
        self.heads, inner = HEADS // parts, width // parts
        self.embedding, self.norm1, self.norm2 = (
            nn.Embedding(VOCABULARY, width),
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.query, self.key, self.value = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.out, self.up = nn.Linear(inner, width, bias=False), nn.Linear(width, 4 * width // parts)
        self.down, self.logits = nn.Linear(4 * width // parts, width, bias=False), nn.Linear(width, VOCABULARY)
        self.enter, self.leave = enter, leave

    def forward(self, tokens):
        x = self.embedding(tokens)
        seen = self.enter(self.norm1(x))
        query, key, value = (
            part(seen).reshape(len(x), LENGTH, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.leave(self.out(mixed.transpose(1, 2).flatten(2)))
        seen = self.enter(self.norm2(x))
        x = x + self.leave(self.down(nn.functional.gelu(self.up(seen))))
        return self.logits(x)
