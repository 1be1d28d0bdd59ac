"""TorchRec's planner on tables given as JSON on standard input; its choice as JSON on the last line. Runs in an
environment that has torchrec: benchmarks/placement.py starts it."""

# pyright: reportMissingImports=false
# (torchrec and fbgemm_gpu are in the rivals' environment only: `make rivals`)

import json
import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology


def main() -> None:
    asked = json.loads(sys.stdin.read())
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, rows, dim, _ in asked["tables"]
    ]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    constraints = {name: ParameterConstraints(pooling_factors=[ids]) for name, _, _, ids in asked["tables"]}
    topology = Topology(
        world_size=asked["ranks"],
        local_world_size=asked["local"],
        compute_device="cuda",
        hbm_cap=asked["hbm_bytes"],
        hbm_mem_bw=asked["hbm_rate"] / 1000,  # bytes in a millisecond
        intra_host_bw=asked["local_rate"] / 1000,
        inter_host_bw=asked["host_rate"] / 1000,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=asked["batch"],
        constraints=constraints,
        debug=False,
        timeout_seconds=asked["seconds"],
    )
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    plan = planner.plan(bags, [sharder])
    (tables,) = plan.plan.values()
    found = []
    for name, sharding in tables.items():
        ranks = list(sharding.ranks or [])
        found.append([name, sharding.sharding_type, ranks])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
