"""What a case is, and hypothesis's strategies that draw one.

A case is plain data whose ``repr`` is the Python that makes it: only what differs from the defaults is in it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import strategies as st

KINDS = ("mlp", "conv", "norm", "attention", "table", "sequence")
RETURNS = ("tensor", "tuple", "list", "dict", "dataclass", "named tuple", "dict subclass")
MODES = ("eager", "whole", "blocks", "dynamic", "told to run eagerly", "one recompilation", "from a later step")


class _Short:
    def __repr__(self) -> str:
        changed = [one for one in dataclasses.fields(self) if getattr(self, one.name) != one.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{one.name}={getattr(self, one.name)!r}' for one in changed)})"


@dataclass(frozen=True, repr=False)
class Block(_Short):
    """A residual module of [batch, length, dim] to the same."""

    kind: str = "mlp"
    width: int = 3  # of what is hidden inside
    bias: bool = True
    frozen: Literal["nothing", "all", "matrices"] = "nothing"
    inside: tuple[Block, ...] = ()  # of a sequence
    unit: bool = True  # fully_shard is called on it
    calls: int = 1  # in a row
    again_at_end: bool = False  # it is called once more behind all the others
    skipped_in_odd_steps: bool = False
    unused: bool = False
    same_as_first: bool = False  # the first block stands in its place once more
    tied_to_first: bool = False  # its matrix is the first block's, where both are of the same kind and width
    returns: str = "tensor"
    keywords: bool = False  # it is called with its input by name
    checkpoint: bool = False
    breaks: bool = False  # a graph break in its forward
    double: bool = False  # it computes in float64, the others in float32


@dataclass(frozen=True, repr=False)
class Step(_Short):
    """One step of the optimizer, and the micro-batches before it."""

    micro: int = 1
    how: Literal["sync", "no_sync", "reduce each"] = "sync"
    length: int = 4
    lengths_differ: bool = False  # ranks have batches of other lengths
    evaluate: bool = False  # a forward without gradients in front
    fault: Literal["", "forward", "block", "backward"] = ""  # where a batch raises, after which the step starts anew
    keep: bool = False  # gradients are set to zero in place, not to None


@dataclass(frozen=True, repr=False)
class Case(_Short):
    blocks: tuple[Block, ...] = (Block(),)
    steps: tuple[Step, ...] = (Step(), Step())
    modes: tuple[str, ...] = ("eager", "eager")  # of each rank
    backend: Literal["aot_eager", "passes", "inductor", "eager"] = "aot_eager"
    dim: int = 4
    tied_head: bool = False
    returns: str = "tensor"  # the model
    replicas: bool = False  # two groups of shards
    reshard: Any = None
    policy: Literal["", "float32", "reduce", "bfloat16"] = ""
    second_dim: bool = False  # matrices are sharded on dim 1
    adam: bool = False
    once: bool = False  # weights stay gathered from one micro-batch to the next
    offload: bool = False  # shards are on the host

    @property
    def ranks(self) -> int:
        return len(self.modes)


def blocks(inner: bool = True) -> st.SearchStrategy[Block]:
    rarely = st.sampled_from([False, False, False, True])
    return st.builds(
        Block,
        kind=st.sampled_from(KINDS if inner else KINDS[:-1]),
        width=st.sampled_from([1, 2, 3, 5, 8]),
        bias=st.booleans(),
        frozen=st.sampled_from(["nothing", "nothing", "nothing", "all", "matrices"]),
        inside=st.lists(blocks(False), min_size=1, max_size=2).map(tuple) if inner else st.just(()),
        unit=st.sampled_from([True, True, False]),
        calls=st.sampled_from([1, 1, 1, 2]),
        again_at_end=rarely,
        skipped_in_odd_steps=rarely,
        unused=rarely,
        same_as_first=rarely,
        tied_to_first=rarely,
        returns=st.sampled_from(RETURNS),
        keywords=rarely,
        checkpoint=rarely,
        breaks=rarely,
        double=rarely,
    ).map(lambda one: one if one.kind == "sequence" else dataclasses.replace(one, inside=()))


def steps() -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        micro=st.sampled_from([1, 1, 2, 3]),
        how=st.sampled_from(["sync", "no_sync", "reduce each"]),
        length=st.sampled_from([4, 4, 2, 6]),
        lengths_differ=st.sampled_from([False, False, True]),
        evaluate=st.sampled_from([False, False, True]),
        fault=st.sampled_from(["", "", "", "", "forward", "block", "backward"]),
        keep=st.sampled_from([False, False, True]),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    ranks: tuple[int, ...] = (1, 2, 3, 4),
    backends: tuple[str, ...] = ("aot_eager",),
    among: tuple[str, ...] = MODES,
    mixed: bool = False,
    most: int = 4,
) -> Case:
    """One with so many blocks and steps at most."""
    num_ranks = draw(st.sampled_from(ranks))
    backend = draw(st.sampled_from(backends))
    mode = draw(st.sampled_from(among))
    modes = (mode,) * num_ranks
    if mixed:
        modes = tuple(draw(st.lists(st.sampled_from(among), min_size=num_ranks, max_size=num_ranks)))
    replicas = num_ranks % 2 == 0 and draw(st.booleans())
    shards = num_ranks // 2 if replicas else num_ranks
    reshard = draw(st.sampled_from([None, True, False, *(one for one in range(2, shards) if shards % one == 0)]))
    case = Case(
        blocks=tuple(draw(st.lists(blocks(), min_size=1, max_size=most))),
        steps=tuple(draw(st.lists(steps(), min_size=1, max_size=most))),
        modes=modes,
        backend=backend,  # type: ignore[arg-type]
        dim=draw(st.sampled_from([4, 4, 6, 10])),
        tied_head=draw(st.booleans()),
        returns=draw(st.sampled_from(RETURNS)),
        replicas=replicas,
        reshard=reshard,
        policy=draw(st.sampled_from(["", "", "float32", "reduce", "bfloat16"])),
        second_dim=draw(st.sampled_from([False, False, True])),
        adam=draw(st.booleans()),
        once=draw(st.sampled_from([False, False, True])) and (reshard is None or isinstance(reshard, bool)),
        offload=draw(st.sampled_from([False, False, False, True])),
    )
    if mixed:
        return for_any_mix(case)
    # Ranks whose lengths differ reach the limit of recompilations at different times: a mix, with all that parts one.
    return with_equal_lengths(case) if mode == "one recompilation" else case


def with_equal_lengths(case: Case) -> Case:
    return dataclasses.replace(case, steps=tuple(dataclasses.replace(one, lengths_differ=False) for one in case.steps))


def for_any_mix(case: Case) -> Case:
    """Return the case without what docs/ranks-that-differ.md lists: ranks in different modes would part."""
    plain = dict.fromkeys(("skipped_in_odd_steps", "unused"), False)

    def without(block: Block, is_compiled: bool) -> Block:
        inside = tuple(without(one, False) for one in block.inside)
        unit = is_compiled if "blocks" in case.modes else block.unit
        return dataclasses.replace(block, inside=inside, unit=unit, tied_to_first=False, breaks=False, **plain)

    blocks = tuple(without(one, is_compiled=True) for one in case.blocks)
    return dataclasses.replace(case, blocks=blocks, tied_head=case.tied_head and not case.reshard, once=False)
