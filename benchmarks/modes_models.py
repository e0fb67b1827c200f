"""The models and data of `benchmarks.modes`: the demo's transformer, and what single rows put in its place."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compile.demo import Block, Settings, Transformer

SIZES = Settings(ranks=4, layers=2, dim=32, head_dim=16, vocab=64, seq=16, batch=2)
NUM_MICRO = 4


def twins(kind: type[Transformer] = Transformer) -> tuple[Transformer, Transformer]:
    """(reference, model to shard) with equal parameters."""
    torch.manual_seed(0)
    reference = kind(SIZES)
    return reference, copy.deepcopy(reference)


def batches(step: int, length: int = SIZES.seq) -> Tensor:
    """Tokens of every rank: [ranks, batch, length]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(SIZES.vocab, (SIZES.ranks, SIZES.batch, length), generator=generator)


def features(step: int) -> Tensor:
    """Inputs of ``Spread``: [ranks, batch, features]."""
    return torch.randn(SIZES.ranks, SIZES.batch, SIZES.dim, generator=torch.Generator().manual_seed(step))


def hidden_states(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a pipeline over two data-parallel ranks: [2, micro-batches, length, features]."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 2, NUM_MICRO, SIZES.seq, SIZES.dim, generator=generator)
    return inputs, targets


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


# Graph breaks.


class Unrolled(Transformer):
    """No loop around the blocks: Dynamo gives up on frames that break inside one."""

    def between(self) -> None:
        """What runs before each block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        self.between()
        x = self.blocks[0](x)
        self.between()
        x = self.blocks[1](x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Broken(Unrolled):
    """Two graph breaks."""

    def between(self) -> None:
        torch._dynamo.graph_break()


# Activation checkpointing.


def _save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in matmuls else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Block):
    """Recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class SelectivelyCheckpointed(Block):
    """Recomputed, but for its matrix multiplications."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_matmuls)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


def as_kind(kind: type[Block], block: nn.Module) -> Block:
    """The same parameters in another kind of block."""
    other = kind(SIZES.dim, SIZES.head_dim)
    other.load_state_dict(block.state_dict())
    return other


# A stage of a pipeline.


class Chunk(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(SIZES.dim, SIZES.head_dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# DTensors on the whole mesh.


class Spread(nn.Module):
    """Two linears on the whole mesh, column-wise and row-wise over "tp"; calling it gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZES.dim, 2 * SIZES.dim)
        self.down = nn.Linear(2 * SIZES.dim, SIZES.dim)
        self.mesh: DeviceMesh | None = None

    def distribute(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        over_tp: dict[str, Placement] = {
            "up.weight": Shard(0),
            "up.bias": Shard(0),
            "down.weight": Shard(1),
            "down.bias": Replicate(),
        }
        for fqn, placement in over_tp.items():
            path, name = fqn.split(".")
            linear = self.get_submodule(path)
            whole = distribute_tensor(getattr(linear, name).data, mesh, [Replicate(), placement])
            setattr(linear, name, nn.Parameter(whole))

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return self.down(torch.relu(self.up(x))).pow(2).mean()
        batch: list[Placement] = [Shard(0), Replicate()]
        spread = DTensor.from_local(x, self.mesh, batch, run_check=False)
        out = self.down(torch.relu(self.up(spread))).redistribute(self.mesh, batch).to_local()
        return out.pow(2).mean()


# LoRA.


class Adapted(nn.Module):
    """A frozen linear, computed with in the dtype of its input, and a trainable addition of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.base.bias is not None
        return F.linear(x, self.base.weight.to(x.dtype), self.base.bias.to(x.dtype)) + self.b(self.a(x))


def adapted(dtype: torch.dtype) -> Transformer:
    """Everything frozen but adapters on the linears of the MLPs, whose weights are stored in ``dtype``."""
    torch.manual_seed(0)
    model = Transformer(SIZES).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    for linear in frozen_linears(model):
        linear.to(dtype)
    return model


def frozen_linears(model: nn.Module) -> list[nn.Linear]:
    return [module.base for module in model.modules() if isinstance(module, Adapted)]


# An all-gather extension.


class Bf16OnTheWire(Tensor):
    """An fp32 tensor that is gathered in bf16."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Bf16OnTheWire:
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Bf16OnTheWire:
        return Bf16OnTheWire(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        aten = torch.ops.aten
        wraps = (aten.detach, aten.clone, aten.slice, aten.view, aten.copy_, aten.add_)
        return cls(out) if func.overloadpacket in wraps and isinstance(out, Tensor) else out

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.inner.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        value = outputs[0].to(param_dtype)
        if out is None:
            return value, (value,)
        with torch.no_grad():
            out.data.copy_(value)
        return None


# Collectives of the user's own.


class GatherByHand:
    """What FSDP2's protocol asks of a gather."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)


def gather_by_hand(block: Any) -> None:
    block.set_custom_all_gather(GatherByHand())


def hook_of_nothing(block: Any) -> None:
    block.set_all_reduce_hook(lambda summed: None)
