"""Reinforcement learning: a policy is trained in shards, compiled, and another process generates with its weights.

    torchrun --standalone --nproc-per-node 3 examples/rl_loop.py      a minute on two cores

    trainers, all ranks but the last     train on what was generated, and stream their weights to the generator
    generator, the last rank             a model of transformers that is not sharded; it samples, and says how probable
                                         each token was

The reward is the share of tokens below half of the vocabulary. Each round prints by how much the trainers'
log-probabilities differ from the generator's: they are of the same weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_compile

VOCAB, PROMPT, LENGTH, ROWS = 64, 4, 20, 8  # rows are those of one trainer


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    generator = dist.get_world_size() - 1
    trainers = dist.new_group(range(generator))
    between = dist.new_group([0, generator])  # the weights' way
    assert trainers is not None and between is not None
    torch.manual_seed(dist.get_rank() == generator)
    if dist.get_rank() == generator:
        generate(options, between)
    else:
        train(options, DeviceMesh.from_group(trainers, "cpu"), between)
    dist.destroy_process_group()


def model_of_bytes() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, eos_token_id=None, **sizes))


def log_probs(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probability of each generated token."""
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return chosen[:, PROMPT - 1 :]


def train(options: argparse.Namespace, mesh: DeviceMesh, between: dist.ProcessGroup) -> None:
    policy = fsdp_compile.auto_shard(model_of_bytes(), mesh=mesh)
    optim = torch.optim.AdamW(policy.parameters(), lr=options.lr)
    compiled = torch.compile(policy, fullgraph=True)
    for number in range(options.rounds):
        for _, tensor in fsdp_compile.stream_full_params(policy, max_bytes="1MiB", dst=0):
            if dist.get_rank() == 0:
                dist.send(tensor.contiguous(), dist.get_world_size() - 1, group=between)
        tokens, theirs = received()
        ours = log_probs(compiled, tokens)
        reward = (tokens[:, PROMPT:] < VOCAB // 2).float().mean(1)
        loss = -((reward - reward.mean())[:, None] * ours).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        said = torch.stack([(ours.detach() - theirs).abs().max(), reward.mean()])
        dist.all_reduce(said[:1], dist.ReduceOp.MAX, mesh.get_group())
        if dist.get_rank() == 0:
            print(f"round {number + 1}: reward {said[1]:.3f}, log-probabilities differ by {said[0]:.1e}", flush=True)


def generate(options: argparse.Namespace, between: dist.ProcessGroup) -> None:
    model = model_of_bytes().eval()

    def arriving() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.state_dict().items():
            came = torch.empty_like(tensor)
            dist.recv(came, 0, group=between)
            yield name, came

    rows = ROWS * (dist.get_world_size() - 1)
    for _ in range(options.rounds):
        missing = fsdp_compile.load_full_params(model, arriving())
        assert not missing, missing
        prompts = torch.randint(0, VOCAB, (rows, PROMPT))
        with torch.no_grad():
            new = LENGTH - PROMPT
            tokens = model.generate(prompts, do_sample=True, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
            said = log_probs(model, tokens)
        dist.broadcast(tokens.contiguous(), dist.get_rank())
        dist.broadcast(said.contiguous(), dist.get_rank())


def received() -> tuple[Tensor, Tensor]:
    """Return this trainer's rows of what was generated, with the generator's log-probabilities."""
    generator = dist.get_world_size() - 1
    tokens = torch.empty(ROWS * generator, LENGTH, dtype=torch.int64)
    said = torch.empty(ROWS * generator, LENGTH - PROMPT)
    for one in (tokens, said):
        dist.broadcast(one, generator)
    mine = slice(ROWS * dist.get_rank(), ROWS * (dist.get_rank() + 1))
    return tokens[mine], said[mine]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Reinforcement learning with streamed weights. Run it by torchrun.")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-2, help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
