"""The same training on any number of processes, sharded, in one graph; it saves, and resumes.

    torchrun --nproc-per-node 2 examples/tutorial/sharded.py --folder checkpoints
    torchrun --nproc-per-node 2 examples/tutorial/sharded.py --folder checkpoints --resume
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import Model, batch_of, loss_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from fsdp_compile import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
parser.add_argument("--resume", action="store_true", help="go on from what was saved")
parser.add_argument("--inspect", action="store_true", help="print what the compiler did in the first step")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (num_ranks,))

torch.manual_seed(0)
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
run = torch.compile(model, fullgraph=True)

done = 0
if args.resume:
    of_model, of_optim = get_state_dict(model, optim)
    saved = {"model": of_model, "optim": of_optim, "done": 0}
    dcp.load(saved, checkpoint_id=args.folder)
    set_state_dict(model, optim, model_state_dict=of_model, optim_state_dict=of_optim)
    done = saved["done"]

for step in range(done, args.steps):
    tokens = batch_of(step).chunk(num_ranks)[rank]
    looking = args.inspect and step == done
    with fsdp_compile.inspect(run) if looking else nullcontext() as report:
        loss = loss_of(run(tokens), tokens)
        loss.backward()
    optim.step()
    optim.zero_grad()
    dist.all_reduce(mean := loss.detach() / num_ranks)
    if rank == 0:
        print(*[report] if looking else [], f"step {step}  loss {mean.item():.4f}", sep="\n")

of_model, of_optim = get_state_dict(model, optim)
dcp.save({"model": of_model, "optim": of_optim, "done": args.steps}, checkpoint_id=args.folder)
dist.destroy_process_group()
