"""One rank of a job whose compile caches are under test: trains two steps and sends what the caches did."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_compile
from fsdp_compile.graph.install import manager
from fsdp_compile.passes import GraphRecord
from fsdp_compile.workers import Send
from tests.building import build_graphs_at_once


def work(settings: dict[str, Any], rank: int, send: Send) -> None:
    caches = settings["caches"]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches[rank])
    build_graphs_at_once()
    dist.init_process_group("gloo", init_method=settings["rendezvous"], rank=rank, world_size=len(caches))
    torch.manual_seed(0)
    # Little code to generate, and several parameters to bucket.
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
    fsdp_compile.fully_shard(model)
    graphs: list[str] = []
    planned: list[str] = []

    def observe(record: GraphRecord) -> None:
        graphs.append(record.stage)
        if record.stage == "joint":
            planned.append(record.plan.to_json())

    manager.observers.append(observe)
    run = torch.compile(model, fullgraph=True)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        run(torch.randn(4, 6, generator=generator)).pow(2).mean().backward()
    plan = fsdp_compile.plan_of(run)
    squares = torch.stack([param.grad.to_local().pow(2).sum() for param in model.parameters()])
    dist.all_reduce(squares)
    norms = squares.sqrt().tolist()
    counters = torch._dynamo.utils.counters
    send(
        {
            "graph_hits": counters["inductor"]["fxgraph_cache_hit"],
            "graph_misses": counters["inductor"]["fxgraph_cache_miss"],
            "autograd_hits": counters["aot_autograd"]["autograd_cache_hit"],
            "autograd_misses": counters["aot_autograd"]["autograd_cache_miss"],
            "autograd_bypasses": counters["aot_autograd"]["autograd_cache_bypass"],
            "passes_ran_on": graphs,
            "planned": planned,
            "plan_of": plan.to_json(),
            "plan_id": plan.id,
            "norms": norms,
        }
    )
    dist.destroy_process_group()
