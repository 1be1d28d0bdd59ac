"""Recall@100 of the two-tower recipe on MovieLens 100K beside a plain PyTorch model of the same form.

    python -m benchmarks.retrieval_quality DIRECTORY [--seeds N] [--write NAME]

Both sides have the same settings, rows and order of batches; the plain one (nn.EmbeddingBag, torch.optim, a loss and a
metric of its own) draws its own initial weights. A JSON line per run, both sides interleaved by seed, then the mean of
Recall@100 and NDCG@100 over seeds with half the width of its 95 % interval (Student's t).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import results_file
from benchmarks.click_quality import interval
from shardwright import config
from shardwright.data.loading.loader import to_batch
from shardwright.data.sources.clicks import ClickLog
from shardwright.jagged import Batch
from shardwright.runtime.run import recipe
from shardwright.runtime.run.train import train

RECIPE = "movielens-two-tower"
FIGURES = ("recall@100", "ndcg@100")
CUTOFF = 100
UNKNOWN = (0, 1)  # rows of missing and of rare values


class PlainTowers(nn.Module):
    """The model in plain PyTorch."""

    def __init__(self, rows: dict[str, int], model: dict) -> None:
        super().__init__()
        dim, self.sides = model["dim"], (model["user"], model["item"])
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(num, dim, mode="mean") for name, num in rows.items()})
        for name, num in rows.items():
            nn.init.uniform_(self.tables.get_parameter(f"{name}.weight"), -(num**-0.5), num**-0.5)
        self.towers = nn.ModuleList()
        for side in self.sides:
            widths, layers = [len(side) * dim, *model["hidden"]], []
            for wide, narrow in zip(widths, widths[1:], strict=False):
                layers += [nn.Linear(wide, narrow), nn.ReLU()]
            self.towers.append(nn.Sequential(*layers[:-1]))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features, bags = batch.features, {}
        counts = features.lengths.sum(1).tolist()
        for name, ids, lengths in zip(features.features, features.values.split(counts), features.lengths, strict=True):
            bags[name] = self.tables[name](ids, lengths.cumsum(0) - lengths)
        user, item = (
            functional.normalize(tower(torch.cat([bags[name] for name in side], 1)), dim=1)
            for side, tower in zip(self.sides, self.towers, strict=True)
        )
        return user, item


def in_batch_loss(user: Tensor, item: Tensor, batch: Batch, ids: Tensor, log_shares: Tensor, temperature: float):
    """Cross entropy over the items of the positives of a batch, without accidental hits."""
    positive = batch.labels["click"] > 0
    user, item, ids = user[positive], item[positive], ids[positive]
    logits = user @ item.T / temperature - log_shares[ids]
    is_hit = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
    return functional.cross_entropy(logits.masked_fill(is_hit, -torch.inf), torch.arange(len(ids)))


def train_plain(settings: config.Settings) -> dict[str, float]:
    source, model = recipe.make_source(settings), settings.model.arguments
    assert isinstance(source, ClickLog) and settings.tables is not None
    torch.manual_seed(settings.seed + 1000)
    towers = PlainTowers({name: rows for name, rows, _ in source.features}, model)
    tables = torch.optim.Adagrad(towers.tables.parameters(), settings.tables.arguments["lr"])
    dense = torch.optim.Adam(towers.towers.parameters(), settings.dense.arguments["lr"])
    item, softmax = model["item"][0], model["softmax"]
    log_shares = torch.from_numpy(source.id_shares(item)).log().float()
    with recipe.make_loader(settings, source) as loader:
        for _ in range(settings.train.epochs):
            for batch in loader:
                ids = column(batch, item)
                users, items = towers(batch)
                loss = in_batch_loss(users, items, batch, ids, log_shares, softmax["temperature"])
                for optimizer in (tables, dense):
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in (tables, dense):
                    optimizer.step()
    return evaluate(towers.eval(), source, model["user"][0], item)


def column(batch: Batch, name: str) -> Tensor:
    """The ids of a feature with one id per sample."""
    start = int(batch.features.lengths[: batch.features.features.index(name)].sum())
    return batch.features.values[start : start + batch.batch_size]


@torch.no_grad()
def evaluate(towers: PlainTowers, source, user: str, item: str) -> dict[str, float]:
    """Recall and NDCG by a sorted list of all items for each user, without positives of training."""
    trained, held_out = (to_batch(part.take(np.arange(part.size))) for part in (source, source.evaluation()))
    items, positives = {}, ({}, {})
    vectors_of = towers(trained), towers(held_out)
    users: dict[int, Tensor] = {}
    for batch, vectors, pairs in zip((trained, held_out), vectors_of, positives, strict=True):
        rows = zip(
            column(batch, user).tolist(), column(batch, item).tolist(), batch.labels["click"].tolist(), strict=True
        )
        for sample, (who, what, label) in enumerate(rows):
            if what not in UNKNOWN:
                items.setdefault(what, vectors[1][sample])
                if label and who not in UNKNOWN:
                    pairs.setdefault(who, set()).add(what)
                    if batch is held_out:
                        users.setdefault(who, vectors[0][sample])
    ids = sorted(items)
    item_matrix, recalls, gains = torch.stack([items[what] for what in ids]), [], []
    for who, held in positives[1].items():
        excluded = positives[0].get(who, set())
        if not (wanted := held - excluded):
            continue
        order = (item_matrix @ users[who]).argsort(descending=True, stable=True).tolist()
        ranked = [ids[place] for place in order if ids[place] not in excluded][:CUTOFF]
        hits = [place for place, what in enumerate(ranked) if what in wanted]
        recalls.append(len(hits) / len(wanted))
        best = sum(1 / np.log2(place + 2) for place in range(min(CUTOFF, len(wanted))))
        gains.append(sum(1 / np.log2(place + 2) for place in hits) / best)
    return {FIGURES[0]: float(np.mean(recalls)), FIGURES[1]: float(np.mean(gains))}


def write_ratings(folder: Path) -> None:
    """A small log: users rate half of the items, those of their own kind with 5 and others with 1."""
    draw, lines = np.random.default_rng(0), ["userId,movieId,rating,timestamp"]
    for number in draw.permutation(40 * 200)[:4000]:
        user, item = divmod(int(number), 200)
        lines.append(f"{user},{item},{5 if user % 4 == item % 4 else 1},{len(lines)}")
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = [f"{item},Title,Kind{item % 2}" for item in range(200)]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="", help="the directory of MovieLens 100K")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if not (args.data or args.smoke):
        parser.error("give the directory of MovieLens 100K, or --smoke")
    lines, overrides = [], []
    with tempfile.TemporaryDirectory() as directory:
        if args.smoke:
            args.data, args.seeds = directory, 2
            write_ratings(Path(directory))
            overrides = ['model.user=["userId"]', 'model.item=["movieId", "genres"]', "train.batch_size=128"]
        overrides += [f"data={args.data}", f"data.cache={directory}/cache", f"run.directory={directory}/runs"]
        for seed in range(1, 1 + args.seeds):
            settings = config.load(RECIPE, [*overrides, f"seed={seed}"])
            evaluation = train(settings).evaluation
            for side, values in (("shardwright", evaluation), ("plain PyTorch", train_plain(settings))):
                lines.append({"side": side, "seed": seed} | {figure: values[figure] for figure in FIGURES})
                print(json.dumps(lines[-1]), flush=True)
    sides = ("shardwright", "plain PyTorch")
    rows = []
    for side in sides:
        intervals = {figure: interval([line[figure] for line in lines if line["side"] == side]) for figure in FIGURES}
        rows.append({"side": side, "seeds": args.seeds, **intervals})
    table = Table("side", "Recall@100", "NDCG@100", title=f"{RECIPE}, {args.seeds} seeds, hold-out")
    for row in rows:
        table.add_row(row["side"], *(f"{row[figure][0]:.4f} ± {row[figure][1]:.4f}" for figure in FIGURES))
    Console(width=100).print(table)
    if args.write:
        results_file.write(args.write, "retrieval_quality", [*lines, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
