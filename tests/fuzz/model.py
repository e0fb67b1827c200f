"""These classes build the module that a case describes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.cases import Block, Case

VOCAB = 7
LONGEST = 9
EPS = 0.1  # of norms: with torch's 1e-5, an input of nearly equal numbers makes rounding larger than a defect


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Pair(NamedTuple):
    hidden: Tensor
    extra: Any = None


class Named(collections.OrderedDict[str, Any]):
    """As transformers' outputs are."""

    @property
    def hidden(self) -> Tensor:
        found: Tensor = self["hidden"]
        return found


PACK: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None),
    "list": lambda x: [x, 1],
    "dict": lambda x: {"hidden": x, "extra": None},
    "dataclass": Output,
    "named tuple": Pair,
    "dict subclass": lambda x: Named(hidden=x),
}


def unpacked(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        output = Pair(*output)
    found: Tensor = output["hidden"] if isinstance(output, dict) else output.hidden
    return found


class Fault(Exception):
    """Raised in the middle of a batch, as a user's code may."""


def raise_in_backward(_: Tensor) -> None:
    raise Fault("in backward")


class Residual(nn.Module):
    """A block adds to its input what ``change`` computes."""

    def __init__(self, said: Block, dim: int, first: Residual | None = None) -> None:
        super().__init__()
        self.said = said
        self.raises_in = ""
        self.norm = nn.LayerNorm(dim, eps=EPS, bias=said.bias)
        self.build(dim)
        tied = first is not None and said.tied_to_first and type(first) is type(self) and first.said.width == said.width
        for name, param in list(self.named_parameters()):
            if tied and param.dim() > 1 and "." in name and not isinstance(self, Sequence):
                owner, _, last = name.rpartition(".")
                setattr(self.get_submodule(owner), last, first.get_parameter(name))  # type: ignore[union-attr]
            elif said.frozen == "all" or (said.frozen == "matrices" and param.dim() > 1):
                param.requires_grad_(False)
        if said.double:
            self.double()

    def build(self, dim: int) -> None:
        raise NotImplementedError

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(x.to(self.norm.weight.dtype))
        if self.said.breaks:
            torch._dynamo.graph_break()
        if self.raises_in == "block":
            raise Fault("in a block")
        out = x + torch.tanh(self.change(hidden)).to(x.dtype)
        if self.raises_in == "backward":
            out.register_hook(raise_in_backward)
        return PACK[self.said.returns](out)


class MLP(Residual):
    def build(self, dim: int) -> None:
        self.up = nn.Linear(dim, self.said.width, bias=self.said.bias)
        self.down = nn.Linear(self.said.width, dim, bias=self.said.bias)

    def change(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.sigmoid(self.up(x)))
        return found


class Conv(Residual):
    def build(self, dim: int) -> None:
        self.conv = nn.Conv1d(dim, dim, 3, padding=1, bias=self.said.bias)

    def change(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return found


class Norm(Residual):
    def build(self, dim: int) -> None:
        self.second = nn.RMSNorm(dim, eps=EPS)

    def change(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(x)
        return found


class Attention(Residual):
    def build(self, dim: int) -> None:
        self.attention = nn.MultiheadAttention(dim, 2, bias=self.said.bias, batch_first=True)

    def change(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return found


class Table(Residual):
    def build(self, dim: int) -> None:
        self.places = nn.Embedding(LONGEST, dim)

    def change(self, x: Tensor) -> Tensor:
        found: Tensor = x * self.places(torch.arange(x.shape[1], device=x.device))
        return found


class Sequence(Residual):
    def build(self, dim: int) -> None:
        self.inside = nn.ModuleList(KINDS[one.kind](one, dim) for one in self.said.inside)

    def change(self, x: Tensor) -> Tensor:
        for one in self.inside:
            x = called(one, x)
        return x


KINDS: dict[str, type[Residual]] = {
    "mlp": MLP, "conv": Conv, "norm": Norm, "attention": Attention, "table": Table, "sequence": Sequence
}  # fmt: skip


def called(block: Residual, x: Tensor) -> Tensor:
    said = block.said
    for _ in range(said.calls):
        if said.checkpoint:
            x = unpacked(checkpoint(block, x, use_reentrant=False))
        else:
            x = unpacked(block(x=x) if said.keywords else block(x))
    return x


class Model(nn.Module):
    """Embedding, the blocks, norm and head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.returns = case.returns
        self.embed = nn.Embedding(VOCAB, case.dim)
        self.blocks = nn.ModuleList()
        for said in case.blocks:
            first: Any = self.blocks[0] if len(self.blocks) else None
            self.blocks.append(
                first if said.same_as_first and first is not None else KINDS[said.kind](said, case.dim, first)
            )
        self.norm = nn.LayerNorm(case.dim, eps=EPS)
        self.head = nn.Linear(case.dim, VOCAB, bias=False)
        if case.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, step: int = 0, fault: int = -1) -> Any:
        x = self.embed(tokens)
        for place, block in enumerate(self.blocks):
            if place == fault:
                raise Fault("in forward")
            if not (block.said.unused or (block.said.skipped_in_odd_steps and step % 2)):
                x = called(block, x)
        for block in self.blocks:
            if block.said.again_at_end and not block.said.unused:
                x = called(block, x)
        return PACK[self.returns](self.head(self.norm(x)))
