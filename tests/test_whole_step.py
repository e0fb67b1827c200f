"""A step whose backward was traced into the graph of its forward: backward gathers again there too."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from fsdp_compile import fully_shard
from fsdp_compile.graph.install import manager
from fsdp_compile.passes import Plan
from fsdp_compile.passes.apply.gather_by_phase import gather_by_phase
from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.apply.merge import merge
from fsdp_compile.passes.apply.overlap import overlap
from fsdp_compile.passes.cost.memory import GATHERED, kinds_of
from fsdp_compile.passes.ir.meta import ROLE
from fsdp_compile.passes.ir.phases import number_phases, phase_of
from fsdp_compile.passes.schedule.planner import plan_graph
from fsdp_compile.passes.wire import lower
from tests.comparing import (
    assert_same_grads,
    backward_on_both,
    batches,
    loss_of,
    mean_over_ranks,
    mine,
    reference_backward,
)
from tests.compiling import no_kernels_built
from tests.models import Stack, pair, shard
from tests.on_ranks import on_two_ranks
from tests.recording import Wire, lifetimes, recorded
from tests.test_graphs import Stages
from tests.test_passes import Builder, spec, text
from tests.test_structure import (
    LAYERS,
    NORM,
    WIDTH,
    Attends,
    BehindTheSum,
    ByHand,
    FrozenBehind,
    Fused,
    Layer,
    LooksUp,
    Net,
    Noisy,
    Pools,
    Positioned,
    Positions,
    ProductsSaved,
    Projections,
    Pruned,
    Recomputed,
)

pytestmark = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 12), reason="2.11 traces no backward over DTensors"
)
aten = torch.ops.aten


# --- graphs built by hand -----------------------------------------------------------------------------------------


class Step(Builder):
    """Writes a graph of several phases: what is called in backward says so, as Dynamo has it."""

    in_backward = False

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().call(op, *args, **kwargs)
        if self.in_backward:
            node.meta["autograd_backward"] = True
        return node


def _phases(graph: fx.Graph) -> str:
    """After the passes, with the phase of each node."""
    number_phases(graph)
    gather_by_phase(graph, Plan("joint"))
    merge(graph, Plan("joint"))
    graph.lint()
    lines = text(graph).split("\n")
    phases = [phase_of(node) for node in graph.nodes if node.op == "call_function"]
    return "\n".join([*(f"{phase}  {line}" for phase, line in zip(phases, lines)), lines[-1]])


def test_backward_gathers_again_and_makes_again_what_is_made_of_weights() -> None:
    b = Step()
    x, mask, s, sv, sk = b.input("x", 5, 3), b.input("mask", 4, 3), b.input("s", 2, 3), b.input("sv", 2), b.input("sk", 2, 4)
    w, bias = b.unshard(s, spec()), b.unshard(sv, spec("up.bias", (4,)))
    kept = b.unshard(sk, spec("head.weight", (4, 4), regather=False))
    masked = b.call(aten.mul.Tensor, w, mask)
    y = b.call(aten.addmm.default, bias, x, b.call(aten.t.default, masked))
    z = b.call(aten.mm.default, y, b.call(aten.t.default, kept))
    loss = b.call(aten.sum.default, z)
    b.in_backward = True
    gz = b.call(aten.expand.default, b.call(aten.ones_like.default, loss), [5, 4])
    gy = b.call(aten.mm.default, gz, kept)
    gx = b.call(aten.mm.default, gy, masked)
    gw = b.call(aten.mul.Tensor, b.call(aten.mm.default, b.call(aten.t.default, gy), x), mask)
    graph = b.output(gx, b.reduce(gw, spec()))
    assert_expected_inline(
        _phases(graph),
        """\
0  unshard_default = unshard(s)
0  unshard_default_1 = unshard(sv)
0  unshard_default_2 = unshard(sk)
0  mul_tensor = mul.Tensor(unshard_default, mask)
0  t_default = t(mul_tensor)
0  addmm_default = addmm(unshard_default_1, x, t_default)
0  t_default_1 = t(unshard_default_2)
0  mm_default = mm(addmm_default, t_default_1)
0  sum_default = sum(mm_default)
1  ones_like_default = ones_like(sum_default)
1  expand_default = expand(ones_like_default, [5, 4])
1  mm_default_1 = mm(expand_default, unshard_default_2)
1  unshard_default_3 = unshard(s)
1  mul_tensor_2 = mul.Tensor(unshard_default_3, mask)
1  mm_default_2 = mm(mm_default_1, mul_tensor_2)
1  t_default_2 = t(mm_default_1)
1  mm_default_3 = mm(t_default_2, x)
1  mul_tensor_1 = mul.Tensor(mm_default_3, mask)
1  reduce_grad_default = reduce_grad(mul_tensor_1)
return mm_default_2, reduce_grad_default""",
    )


def _two_batches(between: bool) -> fx.Graph:
    """Forward, backward, forward, backward; or both forwards in front of both backwards."""
    b = Step()
    xs, s = [b.input("x0", 5, 3), b.input("x1", 5, 3)], b.input("s", 2, 3)
    reduced = []

    def forward(x: fx.Node) -> tuple[fx.Node, fx.Node]:
        b.in_backward = False
        w = b.unshard(s, spec(), "up")
        return w, b.call(aten.sum.default, b.call(aten.mm.default, x, b.call(aten.t.default, w)))

    def backward(x: fx.Node, w: fx.Node, loss: fx.Node) -> None:
        b.in_backward = True
        gy = b.call(aten.expand.default, b.call(aten.ones_like.default, loss), [5, 4])
        b.call(aten.mm.default, gy, w)
        reduced.append(b.reduce(b.call(aten.mm.default, b.call(aten.t.default, gy), x), spec()))

    if between:
        for x in xs:
            backward(x, *forward(x))
    else:
        results = [forward(x) for x in xs]
        for x, result in zip(xs, results):
            backward(x, *result)
    b.in_backward = False
    return b.output(b.call(aten.add.Tensor, *reduced))


def _markers(phases: str) -> str:
    """Those lines that gather or reduce, or take what was gathered."""
    return "\n".join(line for line in phases.split("\n") if re.search("unshard|reduce_grad|add", line))


def test_each_phase_has_a_gather_and_a_reduction_of_its_own() -> None:
    assert_expected_inline(_markers(_phases(_two_batches(between=True))), """\
0  unshard_default = unshard(s)
0  t_default = t(unshard_default)
1  unshard_default_2 = unshard(s)
1  mm_default_1 = mm(expand_default, unshard_default_2)
1  reduce_grad_default = reduce_grad(mm_default_2)
2  unshard_default_1 = unshard(s)
2  t_default_2 = t(unshard_default_1)
3  unshard_default_3 = unshard(s)
3  mm_default_4 = mm(expand_default_1, unshard_default_3)
3  reduce_grad_default_1 = reduce_grad(mm_default_5)
3  add_tensor = add.Tensor(reduce_grad_default, reduce_grad_default_1)
return add_tensor""")


def test_forwards_behind_one_another_share_a_gather_and_so_do_their_backwards() -> None:
    assert_expected_inline(_markers(_phases(_two_batches(between=False))), """\
0  unshard_default = unshard(s)
0  t_default = t(unshard_default)
0  t_default_1 = t(unshard_default)
1  unshard_default_2 = unshard(s)
1  mm_default_2 = mm(expand_default, unshard_default_2)
1  mm_default_4 = mm(expand_default_1, unshard_default_2)
1  add_tensor_1 = add.Tensor(mm_default_3, mm_default_5)
1  reduce_grad_default_2 = reduce_grad(add_tensor_1)
return reduce_grad_default_2""")


def test_backward_gathers_slices_that_forward_kept() -> None:
    b = Step()
    its_spec = spec(num_shards=4, local_length=1, inner_shards=2, inner_group="pair", inner_rank=1)
    x, s = b.input("x", 5, 3), b.input("s", 1, 3)
    w = b.unshard(s, its_spec)
    loss = b.call(aten.sum.default, b.call(aten.mm.default, x, b.call(aten.t.default, w)))
    b.in_backward = True
    gy = b.call(aten.expand.default, b.call(aten.ones_like.default, loss), [5, 4])
    graph = b.output(b.call(aten.mm.default, gy, w))
    assert_expected_inline(_phases(graph), """\
0  unshard_default = unshard(s)
0  keep_slice_default = keep_slice(unshard_default, 0, 2, 2)
0  t_default = t(unshard_default)
0  mm_default = mm(x, t_default)
0  sum_default = sum(mm_default)
1  ones_like_default = ones_like(sum_default)
1  expand_default = expand(ones_like_default, [5, 4])
1  unshard_default_1 = unshard(keep_slice_default)
1  mm_default_1 = mm(expand_default, unshard_default_1)
return mm_default_1""")


def test_backward_begins_to_gather_where_it_begins() -> None:
    """And not while forward's last unit is still there; the unit after is launched ahead, as in a graph of its own."""
    b = Step()
    x, shards, specs = b.input("x", 4, 4), [], []
    for index in range(3):
        specs.append(spec("w", (4, 4), order=index))
        shards.append(b.input(f"s{index}", 2, 4))
    weights, y = [], x
    for index in range(3):
        weights.append(b.unshard(shards[index], specs[index], f"layers.{index}"))
        y = b.call(aten.mm.default, y, weights[-1])
    loss = b.call(aten.sum.default, y)
    b.in_backward = True
    grad = b.call(aten.expand.default, b.call(aten.ones_like.default, loss), [4, 4])
    reduced = []
    for index in reversed(range(3)):
        reduced.append(b.reduce(b.call(aten.mm.default, b.call(aten.t.default, x), grad), specs[index]))
        grad = b.call(aten.mm.default, grad, b.call(aten.t.default, weights[index]))
    graph = b.output(grad, *reduced)
    with mock.patch.object(manager, "_agreement"):  # nobody is there to agree with
        manager.whole(fx.GraphModule({}, graph))
    plan = plan_graph(graph, "whole")
    insert(graph, plan)
    overlap(graph, plan)
    short = {
        "all_gather_into_tensor": "G", "all_gather_members": "G", "reduce_scatter_tensor": "R",
        "reduce_scatter_members": "R", "wait_tensor": "w", "mm": "M", "sum": "loss", "ones_like": "one",
    }  # fmt: skip
    ops = [line.split("= ")[1].split("(")[0] for line in text(graph).split("\n") if "= " in line]
    assert_expected_inline(" ".join(short[op] for op in ops if op in short), """G G w M G w M w M G loss one M R G w M M w R G w M M w R w M w""")
    names = [bucket.fqns[0] for bucket in (*plan.gathers, *plan.reduces)]
    assert_expected_inline(" ".join(names), """layers.0.w layers.1.w layers.2.w layers.2.w@2 layers.1.w@2 layers.0.w@2 layers.2.w layers.1.w layers.0.w""")


@pytest.mark.parametrize("given", ["_given", "_budgets"])
def test_a_given_plan_or_budget_is_refused(given: str) -> None:
    b = Step()
    with mock.patch.object(manager, given, {"id": Plan("joint")}):
        loss = b.call(aten.sum.default, b.unshard(b.input("s", 2, 3), spec(step="id")))
        b.in_backward = True
        graph = b.output(b.call(aten.ones_like.default, loss))
        with pytest.raises(ValueError, match=r"a plan or a memory_budget was given for a model whose .* give neither"):
            manager.whole(fx.GraphModule({}, graph))


# --- graphs of models ---------------------------------------------------------------------------------------------


def _compiled_step(model: nn.Module, backend: str, loss: Callable[[Tensor], Tensor] = loss_of) -> Any:
    @torch.compile(backend=backend, fullgraph=True)
    def step(inputs: Tensor) -> Tensor:
        result = loss(model(inputs))
        result.backward()
        return result.detach()

    return step


def traced() -> Any:
    return torch._dynamo.config.patch(trace_autograd_ops=True)


# torch refuses what is to be computed again where custom functions stand in backward ("2 disjoint backward regions").
BY_HAND = (ByHand, Fused)
CHECKPOINTED = (Recomputed, ProductsSaved, FrozenBehind, Attends, Pools)
ALIKE = (Projections, Pruned, BehindTheSum)  # to this pass, and to what LowRank and Layer are


@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize("without", [(*BY_HAND, *ALIKE), pytest.param((*CHECKPOINTED, *ALIKE), marks=pytest.mark.slow)])
def test_the_same_matrices_are_gathered_again_as_where_backward_is_a_graph(without: tuple[type[Layer], ...]) -> None:
    """Where a formula reads them, that is: no partitioner is there to compute anything again."""
    model = Net(without)
    for one in model.layers:
        fully_shard(one, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    x = torch.randn(50, WIDTH, requires_grad=True)
    with traced(), recorded(Stages()) as stages:
        _compiled_step(model, "passes", torch.sum)(x)
    # A loss that computes its gradients in forward needs its weight in forward alone.
    # And what a region computes that no gradient flows through is saved.
    otherwise: dict[type[Layer], set[str]] = {
        Fused: set(), FrozenBehind: {"b"}, Positions: set(), Positioned: {*NORM}, LooksUp: {*NORM}, Noisy: set()
    }  # fmt: skip
    names = [otherwise.get(layer, LAYERS[layer]) for layer in LAYERS if layer not in without]
    expected = {f"layers.{index}.{name}" for index, of_layer in enumerate(names) for name in of_layer}
    expected.add("head.weight")
    matrices = {name for name, param in model.named_parameters() if sum(n != 1 for n in param.shape) > 1}
    again = set(stages["joint"].plan.again)
    assert again <= expected
    assert again & matrices == expected & matrices
    _assert_no_weight_lives_from_phase_to_phase(stages["whole"].graph)


def _assert_no_weight_lives_from_phase_to_phase(graph: fx.Graph) -> None:
    """Nor what is made of weights, and of nothing else."""
    nodes, kinds = list(graph.nodes), kinds_of(graph)
    weights = [life for life in lifetimes(graph) if kinds[life.storage] == GATHERED]
    assert weights
    for life in weights:
        first, last = (_phase_of_any(node) for node in (life.storage.node, nodes[life.last]))
        assert first == last, f"{life.storage.node} of phase {first} is there until {nodes[life.last]} of phase {last}"


def _phase_of_any(node: fx.Node) -> int:
    """Of compute, and of communication."""
    return node.meta[ROLE].phase if ROLE in node.meta else phase_of(node)


class PostNorm(nn.Module):
    """What a norm's vectors and an embedding go into is read by the next block, and by backward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


def _readers_of_gathers(code: str) -> dict[str, list[tuple[int, str]]]:
    """Of each gather in Inductor's code, the lines that take what it brought."""
    lines = code[code.index("def call") :].split("\nrunner")[0].split("\n")
    readers: dict[str, list[tuple[int, str]]] = {}
    for place, line in enumerate(lines):
        made = re.match(r"\s*(\w+) = .*all_gather_(into_tensor|members)", line)
        if made:
            readers[made[1]] = []
        elif any(call in line for call in ("cpp_fused", "extern_kernels", "aten.clone")):
            for name in set(re.findall(r"\bbuf\d+\b", line)) & set(readers):
                readers[name].append((place, line))
    return readers


@pytest.mark.usefixtures("fake_group_of_four")
def test_generated_code_gathers_twice_and_reads_each_gather_in_its_own_phase() -> None:
    """Inductor would compute an embedding again in backward, from the table that forward gathered."""
    model = Stack(2, block=PostNorm)
    fully_shard(model.embed, reshard_after_forward=True)
    shard(model, reshard_after_forward=True)
    with traced(), recorded(Stages()) as stages, no_kernels_built():
        _, (code,) = run_and_get_code(_compiled_step(model, "inductor"), torch.zeros(4, 7, dtype=torch.long))
    plan = stages["whole"].plan
    assert [bucket.phase for bucket in plan.gathers] == [0] * 4 + [1] * 3  # no gradient reads the embedding's table
    readers = _readers_of_gathers(code)
    assert len(readers) == 7
    ends = [max(place for place, _ in found) for found in readers.values()]
    begins = [min(place for place, _ in found) for found in readers.values()]
    assert max(ends[:4]) < min(begins[4:])
    counts = {one.name: one.count for one in stages["whole"].passes}
    assert counts["write_out"] >= 4
    _assert_no_weight_lives_from_phase_to_phase(stages["whole"].graph)


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_graph_that_no_pass_saw_before_inductor_is_prepared_there() -> None:
    with (
        traced(),
        no_kernels_built(),
        torch._functorch.config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False),
        recorded(Stages()) as stages,
    ):
        _compiled_step(shard(Stack(1)), "inductor")(torch.zeros(4, 7, dtype=torch.long))
    plan = stages["whole"].plan
    assert {"layers.0.up.weight", "layers.0.down.weight"} < set(plan.again)
    assert [bucket.phase for bucket in plan.gathers] == [0, 0, 1, 1]


# --- two ranks ----------------------------------------------------------------------------------------------------


class Alive:
    """Bytes of full weights that are alive whenever a marker that runs as it is has gathered one more."""

    def __init__(self) -> None:
        self.made: list[tuple[StorageWeakRef, int]] = []
        self.most = 0
        self.num_gathers = 0

    def finish_gather(self, *args: Any) -> list[Tensor]:
        fulls = self._finish_gather(*args)
        self.num_gathers += 1
        self.made += [(StorageWeakRef(full.untyped_storage()), full.nbytes) for full in fulls]
        self.made = [(ref, size) for ref, size in self.made if not ref.expired()]
        self.most = max(self.most, sum(size for _, size in self.made))
        return fulls

    def __enter__(self) -> Alive:
        self._finish_gather = lower.finish_gather
        lower.finish_gather = self.finish_gather  # type: ignore[assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        lower.finish_gather = self._finish_gather


@on_two_ranks
def test_numbers_gathers_and_memory() -> None:
    unsharded, sharded = pair(make=functools.partial(Stack, 3, tied=True), reshard_after_forward=True)
    step = _compiled_step(sharded, "aot_eager")
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (sharded, unsharded)]
    with traced(), recorded() as seen:
        for number in range(3):
            loss = step(mine(number))
            expected = reference_backward(unsharded, batches(number))
            torch.testing.assert_close(mean_over_ranks(loss), expected)
            assert_same_grads(sharded, unsharded)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        with Wire() as wire:
            step(mine())
    plan = seen[-1].plan
    assert not [record for record in seen if record.stage == "whole"]
    with traced(), Alive() as alive:
        step(mine())
    # One collective a parameter: of 21, 18 are in three blocks; the rest is tied weights and a norm.
    num_gathers = sum(len(bucket.fqns) for bucket in plan.gathers)
    assert wire.calls["gather"] == alive.num_gathers == num_gathers == 21 + 12 + 3
    num_bytes = {name: param.numel() * 4 for name, param in unsharded.named_parameters()}
    of_root = sum(size for name, size in num_bytes.items() if "layers" not in name)
    of_block = sum(size for name, size in num_bytes.items() if "layers.0" in name)
    assert alive.most <= of_root + 2 * of_block < sum(num_bytes.values())  # of three blocks


@on_two_ranks
def test_it_reduces_what_was_held_back_before() -> None:
    """A batch whose gradients wait, then whole steps: the first one takes them along."""
    unsharded, sharded = pair(make=functools.partial(Stack, 1))
    sharded.set_requires_gradient_sync(False)
    backward_on_both(sharded, unsharded, 0)
    sharded.set_requires_gradient_sync(True)
    step = _compiled_step(sharded, "aot_eager")
    for number in (1, 2):
        with traced():
            step(mine(number))
        reference_backward(unsharded, batches(number))
        assert_same_grads(sharded, unsharded)
        for model in (sharded, unsharded):
            model.zero_grad()
