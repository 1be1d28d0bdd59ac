"""TorchRec's planner for tables in JSON on standard input; prints its plan as JSON on the last line.

benchmarks/placement.py starts it in an environment that has torchrec.
"""

# pyright: reportMissingImports=false
# (torchrec and fbgemm_gpu are only in the environment that `make rivals` creates)

import json
import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology


def main() -> None:
    request = json.loads(sys.stdin.read())
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, rows, dim, _ in request["tables"]
    ]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    constraints = {name: ParameterConstraints(pooling_factors=[ids]) for name, _, _, ids in request["tables"]}
    topology = Topology(
        world_size=request["ranks"],
        local_world_size=request["local"],
        compute_device="cuda",
        hbm_cap=request["hbm_bytes"],
        hbm_mem_bw=request["hbm_rate"] / 1000,  # bytes per millisecond
        intra_host_bw=request["local_rate"] / 1000,
        inter_host_bw=request["host_rate"] / 1000,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=request["batch"],
        constraints=constraints,
        debug=False,
        timeout_seconds=request["seconds"],
    )
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    plan = planner.plan(bags, [sharder])
    (tables,) = plan.plan.values()
    print(json.dumps([[name, table.sharding_type, list(table.ranks or [])] for name, table in tables.items()]))


if __name__ == "__main__":
    main()
