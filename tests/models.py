"""The models of the tests: a stack of blocks, which most of them train, and a zoo with one of every kind.

An entry of the zoo has the blocks to shard and a batch made from a seed. Widths are 5, 7, 10, 20, 34, 50 and the like:
three ranks never share them evenly, two often do not, and some parameters have fewer rows than there are ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard


class Block(nn.Module):
    """Norm, up, down; 2 * dim + 1 hidden features, so that no rank count divides everything."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class EvenBlock(Block):
    """Hidden features that divide by four."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)


class BreakBlock(Block):
    """A graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(torch.relu(hidden))


class Apart(nn.Module):
    """Two layers, and a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Embedding, blocks in a loop, norm and head; tied on request."""

    def __init__(
        self, num_blocks: int = 2, dim: int = 16, vocab: int = 31, tied: bool = False, block: type[nn.Module] = Block
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(block(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Again(Stack):
    """Calls its first layer once more."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x)
        return self.head(self.norm(x))


class Checkpointed(Stack):
    """Every block is recomputed in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


class Spread(nn.Module):
    """Two linear layers that may lie on a whole mesh, the second row-wise where it has a "tp" dimension."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.mesh: DeviceMesh | None = None

    def distribute(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        names = mesh.mesh_dim_names or ()
        for linear, weight, bias in ((self.up, Shard(0), Shard(0)), (self.down, Shard(1), Replicate())):
            for name, placement in (("weight", weight), ("bias", bias)):
                placements = [placement if dim == "tp" else Replicate() for dim in names]
                setattr(linear, name, nn.Parameter(distribute_tensor(getattr(linear, name).data, mesh, placements)))

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return self.down(torch.relu(self.up(x)))
        batch: list[Placement] = [Replicate() if dim == "tp" else Shard(0) for dim in self.mesh.mesh_dim_names or ()]
        spread = DTensor.from_local(x, self.mesh, batch, run_check=False)
        return self.down(torch.relu(self.up(spread))).redistribute(self.mesh, batch).to_local()


class Fault(torch.autograd.Function):
    """Raises in backward where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.raises:
            raise ArithmeticError("in backward")
        return grad, None


def shard(model: Any, **kwargs: Any) -> Any:
    """Each block, then the root."""
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def twins(make: Callable[[], Any] = Stack, seed: int = 0) -> tuple[Any, Any]:
    """Two with equal parameters, neither of them sharded."""
    torch.manual_seed(seed)
    one = make()
    return one, copy.deepcopy(one)


def pair(seed: int = 0, make: Callable[[], Stack] = Stack, **kwargs: Any) -> tuple[Stack, Stack]:
    """(unsharded, sharded) with equal parameters."""
    unsharded, model = twins(make, seed)
    return unsharded, shard(model, **kwargs)


def mesh_of(*dims: str) -> DeviceMesh:
    """Two ranks in each named dimension."""
    return init_device_mesh("cpu", (2,) * len(dims), mesh_dim_names=dims)


# --- the zoo -----------------------------------------------------------------------------------------------------

Batch = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo."""

    build: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], list[nn.Module]]  # one fully_shard call each; the root comes after them
    batch: Callable[[int], Batch]  # keyword arguments of ``loss``, from a seed
    loss: Callable[..., Tensor]  # loss(model, **batch)


def squared_error(model: nn.Module, *, target: Tensor, **inputs: Any) -> Tensor:
    return F.mse_loss(model(**inputs), target)


def rows(width: int, out: int) -> Callable[[int], Batch]:
    """Batches of five rows for a model from ``width`` features to ``out``."""

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return {
            "input": torch.randn(5, width, generator=generator),
            "target": torch.randn(5, out, generator=generator),
        }

    return batch


# --- plain torch ------------------------------------------------------------------------------------------------


class Loop(nn.Module):
    """A Python loop over a module list, then parameters with one and two rows."""

    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.scale = nn.Parameter(torch.ones(1, width))
        self.mix = nn.Parameter(torch.tensor([[1.0], [0.5]]))

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = layer(input)
        return input * self.scale * self.mix.sum(0)


class AttentionBlock(nn.Module):
    """nn.MultiheadAttention reads its own parameters and those of its output projection in one functional call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=5, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        normed = self.norm(input)
        return input + self.attention(normed, normed, normed, need_weights=False)[0]


class ConvBlock(nn.Module):
    """Convolution and batch norm, whose running statistics are buffers.

    A bias between them would get rounding for a gradient, which AdamW turns into steps of random sign.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, input: Tensor) -> Tensor:
        return input + F.silu(self.norm(self.conv(input)))


def conv_net() -> nn.Module:
    stem = nn.Conv2d(3, 5, 3, padding=1)
    return nn.Sequential(stem, ConvBlock(5), ConvBlock(5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4))


def images_and_targets(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input": torch.randn(4, 3, 6, 6, generator=generator),
        "target": torch.randn(4, 4, generator=generator),
    }


class ListBlock(nn.Module):
    """Parameters in an nn.ParameterList."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:
        for weight in self.weights:
            input = input + torch.tanh(input @ weight)
        return input


class DictBlock(nn.Module):
    """Parameters in an nn.ParameterDict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"up": torch.randn(width, 4) / width, "down": torch.randn(4, width) / width})

    def forward(self, input: Tensor) -> Tensor:
        return input + torch.tanh(input @ self.weights["up"]) @ self.weights["down"]


class TwiceBlock(nn.Module):
    """One weight, read twice by its module and once more by the block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(input))) + input @ self.inner.weight


class PartlyUsedBlock(Block):
    """Two parameters take no part in forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.unused = nn.Linear(width, 4)


class FrozenBlock(Block):
    """The first linear does not train."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up.requires_grad_(False)


class TiedInBlock(nn.Module):
    """Two modules of one unit share a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, input: Tensor) -> Tensor:
        return input + self.second(torch.tanh(self.first(input)))


def tied_across_blocks() -> nn.Module:
    """The last block's weight is the first one's."""
    model = loop_of(Block, 7)()
    model.layers[1].down.weight = model.layers[0].down.weight
    return model


class Sometimes(nn.Module):
    """A branch that only some steps take; the caller says which."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always = Block(width)
        self.sometimes = Block(width)

    def forward(self, input: Tensor, detour: bool) -> Tensor:
        input = self.always(input)
        return self.sometimes(input) if detour else input


def rows_with_a_detour(seed: int) -> Batch:
    """The detour on even steps (seeds are in the hundreds, by step)."""
    return {**rows(7, 7)(seed), "detour": seed // 100 % 2 == 0}


def loop_of(block: type[nn.Module], width: int) -> Callable[[], Any]:
    return lambda: Loop([block(width) for _ in range(2)], width)  # type: ignore[call-arg]


def layers(model: Any) -> list[nn.Module]:
    return list(model.layers)


def children(model: nn.Module) -> list[nn.Module]:
    return [child for child in model.children() if any(True for _ in child.parameters())]


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 5))


def sequences_of_features(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"input": torch.randn(2, 5, 10, generator=generator), "target": torch.randn(2, 5, 10, generator=generator)}


PLAIN = {
    "sequential": Entry(sequential, children, rows(7, 5), squared_error),
    "loop": Entry(loop_of(Block, 7), layers, rows(7, 7), squared_error),
    "attention": Entry(loop_of(AttentionBlock, 10), layers, sequences_of_features, squared_error),
    "conv": Entry(conv_net, children, images_and_targets, squared_error),
    "parameter_list": Entry(loop_of(ListBlock, 7), layers, rows(7, 7), squared_error),
    "parameter_dict": Entry(loop_of(DictBlock, 7), layers, rows(7, 7), squared_error),
    "used_twice": Entry(loop_of(TwiceBlock, 7), layers, rows(7, 7), squared_error),
    "frozen": Entry(loop_of(FrozenBlock, 7), layers, rows(7, 7), squared_error),
    "unused": Entry(loop_of(PartlyUsedBlock, 7), layers, rows(7, 7), squared_error),
    "sometimes": Entry(lambda: Sometimes(7), children, rows_with_a_detour, squared_error),
    "tied_in_group": Entry(loop_of(TiedInBlock, 7), layers, rows(7, 7), squared_error),
    "tied_across_groups": Entry(tied_across_blocks, layers, rows(7, 7), squared_error),
}


# --- Hugging Face, from small configs ----------------------------------------------------------------------------

VOCABULARY = 50


def cross_entropy(model: nn.Module, *, target: Tensor, **inputs: Any) -> Tensor:
    """Outside the model: its own loss computes in float32, whatever the dtype of the model."""
    return F.cross_entropy(model(**inputs).logits.flatten(0, -2), target.flatten())


def tokens(seed: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1], "target": ids[:, 1:]}


def token_pairs(seed: int) -> Batch:
    """For models with an encoder and a decoder."""
    batch = tokens(seed)
    return {**batch, "decoder_input_ids": batch["input_ids"].flip(1)}


def decoder_config(**more: Any) -> dict[str, Any]:
    """What the configs of Llama and its descendants have in common."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 20,
        "intermediate_size": 34,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
        "use_cache": False,
        **more,
    }


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**decoder_config()))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(**decoder_config(num_local_experts=4, num_experts_per_tok=2)))
    model.set_experts_implementation("batched_mm")  # the loop over experts depends on data and breaks the graph
    return model


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=20,
            d_kv=10,
            d_ff=34,
            num_layers=2,
            num_heads=2,
            relative_attention_num_buckets=8,
            dropout_rate=0.0,
            use_cache=False,
        )
    )


HUGGING_FACE = {
    "llama": Entry(llama, lambda model: list(model.model.layers), tokens, cross_entropy),
    "mixtral": Entry(mixtral, lambda model: list(model.model.layers), tokens, cross_entropy),
    "t5": Entry(t5, lambda model: [*model.encoder.block, *model.decoder.block], token_pairs, cross_entropy),
}


# --- one unit, and a stack of which a part is left out -------------------------------------------------------------


def one_unit(make: Callable[[], Any], **kwargs: Any) -> tuple[Any, Any]:
    """(unsharded, sharded) with equal parameters; the sharded one is one unit."""
    unsharded, model = twins(make)
    return unsharded, fully_shard(model, **kwargs)


class HalfUsed(Stack):
    """The second block runs on request alone."""

    skip = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if not (self.skip and index == 1):
                x = layer(x)
        return self.head(self.norm(x))
