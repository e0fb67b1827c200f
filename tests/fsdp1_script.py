"""A training script for torch's FSDP1 as users have them, which knows of nothing else: run by test_adopt.py."""

import functools
import sys

import torch
import torch.distributed as dist
from fsdp2_script import Model  # beside it, as a script's own modules are
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FSDP(
        Model(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    assert isinstance(model, FSDP) and len(FSDP.fsdp_modules(model)) == 3
    run = torch.compile(model, fullgraph=True) if "compile" in sys.argv else model
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(int(sys.argv[1])):
        tokens = torch.randint(0, 31, (2, 8), generator=generator)
        loss = nn.functional.cross_entropy(run(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
        losses.append(f"{loss.item():.6f}")
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    ):
        saved = model.state_dict()
    if dist.get_rank() == 0:
        print("engine", type(model).__module__, flush=True)
        print("losses", *losses, flush=True)
        print("graphs", counters["stats"]["unique_graphs"], "breaks", counters["graph_break"].total(), flush=True)
        print("saved", *(f"{name}:{tuple(value.shape)}" for name, value in saved.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
