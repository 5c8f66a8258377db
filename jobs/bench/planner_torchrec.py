"""Runs TorchRec's planner on one problem: JSON on stdin, JSON on stdout. For `planner.py --against torchrec`.

Started by an interpreter that has TorchRec; nothing of rayrec is imported here.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torchrec
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, Shard


def main() -> None:
    problem = json.load(sys.stdin)
    model = _model(problem)
    sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": _optimizer()})]
    topology = Topology(
        world_size=problem["world_size"],
        local_world_size=problem["local_world_size"],
        compute_device="cuda",
        hbm_cap=problem["hbm_cap"],
        ddr_cap=problem["ddr_cap"],
        hbm_mem_bw=problem["hbm_mem_bw"] / 1000,  # bytes per millisecond there
        intra_host_bw=problem["intra_host_bw"] / 1000,
        inter_host_bw=problem["inter_host_bw"] / 1000,
    )
    constraints = {t["name"]: ParameterConstraints(pooling_factors=[t["pooling"]]) for t in problem["tables"]}
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=problem["batch_size"], constraints=constraints, debug=False
    )
    start = time.perf_counter()
    plan = planner.plan(model, sharders)
    seconds = time.perf_counter() - start
    theirs = {"": {name: _sharding(p) for name, p in plan.plan["ebc"].items()}}
    enumerator = EmbeddingEnumerator(topology=topology, batch_size=problem["batch_size"], constraints=constraints)
    options = enumerator.enumerate(model, sharders)
    answer = {
        "seconds": seconds,
        "plan": {"version": 1, "plan": theirs},
        "theirs_ms": _score(options, theirs[""], problem["world_size"]),
        "ours_ms": _score(options, problem["ours"], problem["world_size"]),
    }
    print(json.dumps(answer))


def _optimizer() -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return EmbOptimType.EXACT_ROWWISE_ADAGRAD


def _model(problem: dict[str, Any]) -> nn.Module:
    model = nn.Module()
    model.ebc = torchrec.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            torchrec.EmbeddingBagConfig(
                name=t["name"], num_embeddings=t["rows"], embedding_dim=t["dim"], feature_names=[t["feature"]]
            )
            for t in problem["tables"]
        ],
    )
    return model


def _sharding(p: Any) -> dict[str, Any]:
    """A parameter's sharding as rayrec's JSON has it; a data-parallel table lists a whole copy on every rank."""
    kernel = "fused" if p.compute_kernel == "dense" else p.compute_kernel
    if p.sharding_spec is None:
        return {"sharding_type": p.sharding_type, "compute_kernel": kernel, "ranks": p.ranks, "shards": None}
    shards = [
        {
            "shard_offsets": list(s.shard_offsets),
            "shard_sizes": list(s.shard_sizes),
            "placement": f"rank:{s.placement.rank()}/cuda:{s.placement.rank()}",
        }
        for s in p.sharding_spec.shards
    ]
    return {"sharding_type": p.sharding_type, "compute_kernel": kernel, "ranks": p.ranks, "shards": shards}


def _score(options: list[Any], plan: dict[str, Any], world_size: int) -> float | None:
    """The worst rank in milliseconds by TorchRec's own estimates; none where it has no such option."""
    load = [0.0] * world_size
    for name, sharding in plan.items():
        match = [
            o
            for o in options
            if o.name == name
            and o.sharding_type == sharding["sharding_type"]
            and (o.compute_kernel == sharding["compute_kernel"] or sharding["shards"] is None or _replicated(sharding))
            and _same_cut(o.shards, sharding)
        ]
        if not match:
            return None
        ranks = sharding["ranks"] if sharding["shards"] is None else [_rank(s) for s in sharding["shards"]]
        for shard, rank in zip(match[0].shards, ranks, strict=False):
            load[rank] += shard.perf.total
    return max(load)


def _replicated(sharding: dict[str, Any]) -> bool:
    return sharding["sharding_type"] == "data_parallel"


def _same_cut(shards: list[Shard], sharding: dict[str, Any]) -> bool:
    if sharding["shards"] is None or _replicated(sharding):
        return True
    return [list(s.size) for s in shards] == [s["shard_sizes"] for s in sharding["shards"]]


def _rank(shard: dict[str, Any]) -> int:
    return int(shard["placement"].removeprefix("rank:").split("/")[0])


if __name__ == "__main__":
    main()
