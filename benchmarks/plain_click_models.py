"""The built-in click models in plain PyTorch: nn.EmbeddingBag(sparse=True), torch's layers and torch.optim.

They are what a user writes without Shardwright, and share no code with it but the reader of the log. `train` takes the
settings of a recipe: the same form, sizes, initial values, optimizers, rows and order of batches.

Shape legend: B samples, F vectors of a sample, D columns of a vector, W columns of all vectors, N numeric features.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright import config
from shardwright.data.loading.loader import Loader
from shardwright.data.sources.clicks import ClickLog
from shardwright.jagged import Batch
from shardwright.runtime.run import recipe

Features = Sequence[tuple[str, int, bool]]  # name, rows, is multi-hot


class Tables(nn.Module):
    """A table per feature; several ids of a sample are averaged. A batch -> (B, F, D)."""

    def __init__(self, features: Features, dim: int, init: float | None) -> None:
        super().__init__()
        self.bags = nn.ModuleList()
        for _, rows, multi_hot in features:
            bag = nn.EmbeddingBag(rows, dim, mode="mean" if multi_hot else "sum", sparse=True)
            bound = init or rows**-0.5
            nn.init.uniform_(bag.weight, -bound, bound)
            self.bags.append(bag)

    def forward(self, batch: Batch) -> Tensor:
        lengths_FB = batch.features.lengths
        ids = batch.features.values.split(lengths_FB.sum(1).tolist())
        offsets_FB = lengths_FB.cumsum(1) - lengths_FB
        return torch.stack([bag(*pair) for bag, *pair in zip(self.bags, ids, offsets_FB, strict=True)], dim=1)


def hidden_layers(width: int, widths: Sequence[int], form: Mapping[str, Any]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for wide, narrow in zip((width, *widths), widths, strict=False):
        norm = [nn.BatchNorm1d(narrow)] if form.get("norm") == "batch" else []
        layers += [nn.Linear(wide, narrow), *norm, nn.ReLU(), nn.Dropout(form.get("dropout", 0.0))]
    return layers


def output(width: int, base_rate: float) -> nn.Linear:
    linear = nn.Linear(width, 1)
    nn.init.constant_(linear.bias, math.log(base_rate / (1 - base_rate)))
    return linear


class Deep(nn.Module):
    """An MLP to one logit."""

    def __init__(self, width: int, hidden: Sequence[int], base_rate: float, form: Mapping[str, Any]) -> None:
        super().__init__()
        last = output(hidden[-1] if hidden else width, base_rate)
        self.layers = nn.Sequential(*hidden_layers(width, hidden, form), last)

    def forward(self, x_BW: Tensor) -> Tensor:
        return self.layers(x_BW).squeeze(1)


def pair_products(x_BFD: Tensor) -> Tensor:
    left, right = torch.triu_indices(x_BFD.shape[1], x_BFD.shape[1], 1)
    return torch.bmm(x_BFD, x_BFD.mT)[:, left, right]


class Logistic(nn.Module):
    def __init__(self, features: Features, num_dense: int, base_rate: float, *, init: float | None = None) -> None:
        super().__init__()
        self.tables, self.linear = Tables(features, 1, init), nn.Linear(num_dense, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, math.log(base_rate / (1 - base_rate)))

    def forward(self, batch: Batch) -> Tensor:
        return self.linear(batch.numbers).squeeze(1) + self.tables(batch).sum((1, 2))


class DLRM(nn.Module):
    def __init__(self, features: Features, num_dense: int, base_rate: float, **model: Any) -> None:
        super().__init__()
        form, dim, bottom = model.get("mlp", {}), model["dim"], model["bottom"]
        self.tables = Tables(features, dim, model.get("init"))
        self.bottom = nn.Sequential(*hidden_layers(num_dense, bottom, form)) if num_dense else None
        num = len(features) + bool(num_dense)
        self.top = Deep(num * (num - 1) // 2 + dim * bool(num_dense), model["top"], base_rate, form)

    def forward(self, batch: Batch) -> Tensor:
        x_BFD = self.tables(batch)
        if self.bottom is None:
            return self.top(pair_products(x_BFD))
        dense_BD = self.bottom(batch.numbers)
        x_BFD = torch.cat([dense_BD.unsqueeze(1), x_BFD], dim=1)
        return self.top(torch.cat([dense_BD, pair_products(x_BFD)], dim=1))


class WideDeep(nn.Module):
    def __init__(self, features: Features, num_dense: int, base_rate: float, **model: Any) -> None:
        super().__init__()
        self.tables = Tables(features, model["dim"], model.get("init"))
        self.weights, self.wide = Tables(features, 1, model.get("init")), nn.Linear(num_dense, 1)
        for parameter in self.wide.parameters():
            nn.init.zeros_(parameter)
        width = num_dense + len(features) * model["dim"]
        self.deep = Deep(width, model["hidden"], base_rate, model.get("mlp", {}))

    def forward(self, batch: Batch) -> Tensor:
        wide_B = self.wide(batch.numbers).squeeze(1) + self.weights(batch).sum((1, 2))
        return wide_B + self.deep(torch.cat([batch.numbers, self.tables(batch).flatten(1)], dim=1))


class WithNumbers(nn.Module):
    """Tables, and a vector per numeric feature that its value scales."""

    def __init__(self, features: Features, num_dense: int, dim: int, init: float | None) -> None:
        super().__init__()
        self.tables = Tables(features, dim, init)
        self.numbers = nn.Parameter(torch.randn(num_dense, dim) * 0.01)

    def forward(self, batch: Batch) -> Tensor:
        return torch.cat([batch.numbers.unsqueeze(2) * self.numbers, self.tables(batch)], dim=1)


class DeepFM(nn.Module):
    def __init__(self, features: Features, num_dense: int, base_rate: float, **model: Any) -> None:
        super().__init__()
        self.vectors = WithNumbers(features, num_dense, model["dim"], model.get("init"))
        self.weights, self.wide = Tables(features, 1, model.get("init")), nn.Linear(num_dense, 1)
        for parameter in self.wide.parameters():
            nn.init.zeros_(parameter)
        width = (num_dense + len(features)) * model["dim"]
        self.deep = Deep(width, model["hidden"], base_rate, model.get("mlp", {}))

    def forward(self, batch: Batch) -> Tensor:
        x_BFD = self.vectors(batch)
        first_B = self.wide(batch.numbers).squeeze(1) + self.weights(batch).sum((1, 2))
        second_B = (x_BFD.sum(1).square() - x_BFD.square().sum(1)).sum(1) / 2
        return first_B + second_B + self.deep(x_BFD.flatten(1))


class DCN(nn.Module):
    def __init__(self, features: Features, num_dense: int, base_rate: float, **model: Any) -> None:
        super().__init__()
        hidden = model["hidden"]
        self.tables = Tables(features, model["dim"], model.get("init"))
        width = num_dense + len(features) * model["dim"]
        self.make_crosses(width, model)
        self.deep = nn.Sequential(*hidden_layers(width, hidden, model.get("mlp", {})))
        self.head = output(width + hidden[-1], base_rate)

    def make_crosses(self, width: int, model: Mapping[str, Any]) -> None:
        self.weights = nn.Parameter(torch.randn(model["num_cross"], width) * width**-0.5)
        self.biases = nn.Parameter(torch.zeros(model["num_cross"], width))

    def cross(self, first_BW: Tensor) -> Tensor:
        x_BW = first_BW
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x_BW = first_BW * (x_BW @ weight).unsqueeze(1) + bias + x_BW
        return x_BW

    def forward(self, batch: Batch) -> Tensor:
        first_BW = torch.cat([batch.numbers, self.tables(batch).flatten(1)], dim=1)
        return self.head(torch.cat([self.cross(first_BW), self.deep(first_BW)], dim=1)).squeeze(1)


class DCNv2(DCN):
    def make_crosses(self, width: int, model: Mapping[str, Any]) -> None:
        self.crosses = nn.ModuleList(
            nn.Sequential(nn.Linear(width, model["rank"], bias=False), nn.Linear(model["rank"], width))
            for _ in range(model["num_cross"])
        )

    def cross(self, first_BW: Tensor) -> Tensor:
        x_BW = first_BW
        for cross in self.crosses:
            x_BW = first_BW * cross(x_BW) + x_BW
        return x_BW


class AttentionLayer(nn.Module):
    def __init__(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.shortcut = (
            nn.Linear(dim, num_heads * head_dim, bias=False) for _ in range(4)
        )

    def forward(self, x_BFD: Tensor) -> Tensor:
        heads = [
            linear(x_BFD).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return functional.relu(mixed + self.shortcut(x_BFD))


class AutoInt(nn.Module):
    def __init__(self, features: Features, num_dense: int, base_rate: float, **model: Any) -> None:
        super().__init__()
        self.vectors = WithNumbers(features, num_dense, model["dim"], model.get("init"))
        sizes = [model["dim"]] + [model["num_heads"] * model["head_dim"]] * model["num_layers"]
        self.layers = nn.Sequential(*(AttentionLayer(dim, model["num_heads"], model["head_dim"]) for dim in sizes[:-1]))
        num = num_dense + len(features)
        self.head = output(num * sizes[-1], base_rate)
        self.deep = Deep(num * sizes[0], model["hidden"], base_rate, model.get("mlp", {}))
        self.deep.layers[-1] = nn.Linear(model["hidden"][-1], 1)

    def forward(self, batch: Batch) -> Tensor:
        x_BFD = self.vectors(batch)
        return self.head(self.layers(x_BFD).flatten(1)).squeeze(1) + self.deep(x_BFD.flatten(1))


class EnsembleLayer(nn.Module):
    """The layer of the recipe `dhen`: dot products with an MLP, and a linear module, added; a shortcut; layer norm."""

    def __init__(self, num_in: int, num_out: int, dim: int, num_dense: int) -> None:
        super().__init__()
        self.numbers = nn.Linear(num_dense, dim) if num_dense else None
        num = num_in + bool(num_dense)
        self.deep = nn.Sequential(nn.Linear(num * (num - 1) // 2, 64), nn.ReLU())
        self.project = nn.Linear(64, num_out * dim, bias=False)
        self.linear = nn.Linear(num, num_out, bias=False)
        self.shortcut = nn.Identity() if num_in == num_out else nn.Linear(num_in, num_out, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x_BFD: Tensor, numbers_BN: Tensor) -> Tensor:
        inputs_BFD = x_BFD
        if self.numbers is not None:
            inputs_BFD = torch.cat([x_BFD, self.numbers(numbers_BN).unsqueeze(1)], dim=1)
        linear = self.linear(inputs_BFD.mT).mT
        dots = self.project(self.deep(pair_products(inputs_BFD))).view_as(linear)
        return self.norm(dots + linear + self.shortcut(x_BFD.mT).mT)


class DHEN(nn.Module):
    def __init__(self, features: Features, num_dense: int, base_rate: float, **model: Any) -> None:
        super().__init__()
        dim, stack, form = model["dim"], model["stack"], model.get("mlp", {})
        if model["modules"] != ["dlrm", "linear"] or stack["ensemble"] != "sum" or not stack["raw"]:
            raise SystemExit("the plain DHEN has the modules dlrm and linear, added, with raw numbers")
        self.tables = Tables(features, dim, model.get("init"))
        self.bottom = nn.Sequential(*hidden_layers(num_dense, model["bottom"], form)) if num_dense else None
        sizes = [len(features) + bool(num_dense)] + [stack["embeddings"]] * stack["layers"]
        self.layers = nn.ModuleList(
            EnsembleLayer(num_in, num_out, dim, num_dense) for num_in, num_out in zip(sizes, sizes[1:], strict=False)
        )
        self.head = Deep(sizes[-1] * dim, model["top"], base_rate, form)

    def forward(self, batch: Batch) -> Tensor:
        x_BFD = self.tables(batch)
        if self.bottom is not None:
            x_BFD = torch.cat([self.bottom(batch.numbers).unsqueeze(1), x_BFD], dim=1)
        for layer in self.layers:
            x_BFD = layer(x_BFD, batch.numbers)
        return self.head(x_BFD.flatten(1))


MODELS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "logistic": Logistic,
        "dlrm": DLRM,
        "wide_deep": WideDeep,
        "deepfm": DeepFM,
        "dcn": DCN,
        "dcn_v2": DCNv2,
        "autoint": AutoInt,
        "dhen": DHEN,
    }
)


class TableOptimizer:
    """torch's Adagrad for sparse gradients, and L2 regularization of the rows that a batch looks up."""

    def __init__(self, weights: Sequence[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        self.weights, self.weight_decay = weights, weight_decay
        self.adagrad = torch.optim.Adagrad(weights, lr)

    def step(self) -> None:
        if self.weight_decay:
            for weight in self.weights:
                assert weight.grad is not None
                grad = weight.grad.coalesce()
                grad.values().add_(weight.detach()[grad.indices()[0]], alpha=self.weight_decay)
                weight.grad = grad
        self.adagrad.step()
        self.adagrad.zero_grad()


def train(settings: config.Settings) -> dict[str, float]:
    """Train on the rows of a recipe, in its order, and score its held-out rows: metrics, and samples per second."""
    source = recipe.make_source(settings)
    settings = recipe.epochs_to_steps(settings, source)
    assert isinstance(source, ClickLog) and settings.tables is not None and settings.tables.kind == "adagrad"
    torch.manual_seed(settings.seed + 1000)
    make = MODELS[settings.model.kind]
    model = make(source.features, source.num_dense, source.base_rates["click"], **settings.model.arguments)
    tables = [bag.weight for bag in model.modules() if isinstance(bag, nn.EmbeddingBag)]
    is_table = {id(weight) for weight in tables}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in is_table]
    optimizers = [TableOptimizer(tables, **settings.tables.arguments), dense_optimizer(settings, dense)]
    loss_of, num, start = nn.BCEWithLogitsLoss(), 0, time.perf_counter()
    with recipe.make_loader(settings, source) as loader:
        for _ in range(settings.train.epochs):
            for batch in loader:
                loss_of(model(batch), batch.labels["click"]).backward()
                for optimizer in optimizers:
                    optimizer.step()
                optimizers[1].zero_grad()
                num += batch.batch_size
    rate = num / (time.perf_counter() - start)
    return held_out_metrics(model.eval(), source, settings.train.batch_size) | {"samples_per_second": rate}


def dense_optimizer(settings: config.Settings, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    arguments = dict(settings.dense.arguments)
    return getattr(torch.optim, settings.dense.kind)(parameters, **arguments)


@torch.no_grad()
def held_out_metrics(model: nn.Module, source: ClickLog, batch_size: int) -> dict[str, float]:
    logits, labels = [], []
    with Loader(source.evaluation(), batch_size=batch_size, shuffle=False) as loader:
        for batch in loader:
            logits.append(model(batch).double())
            labels.append(batch.labels["click"].double())
    scores, clicks = torch.cat(logits), torch.cat(labels)
    log_loss = float(functional.binary_cross_entropy_with_logits(scores, clicks))
    rate = float(clicks.mean())
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    return {
        "samples": len(clicks),
        "ne": log_loss / entropy,
        "auc": area_under_curve(scores.numpy(), clicks.numpy() > 0),
        "log_loss": log_loss,
    }


def area_under_curve(scores: np.ndarray, is_click: np.ndarray) -> float:
    """The share of pairs whose click has the higher score; equal scores count half."""
    clicks, others = np.sort(scores[is_click]), np.sort(scores[~is_click])
    below, not_above = (np.searchsorted(others, clicks, side=side).sum() for side in ("left", "right"))
    return float(below + not_above) / 2 / len(clicks) / len(others)
