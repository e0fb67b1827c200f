"""Every block of docs/recipes.md runs as it stands, and does what its section says."""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_compile import fully_shard
from fsdp_compile.optim import muon_groups
from tests.comparing import (
    assert_same_grads,
    assert_same_params,
    batches,
    full,
    loss_of,
    mine,
    reference_backward,
    train_and_compare,
)
from tests.compiling import num_graphs
from tests.models import Block, EvenBlock, Stack, shard, twins
from tests.ranks import Ranks
from tests.recording import Wire
from tests.test_graphs import saved_weights

RECIPES = (Path(__file__).resolve().parents[1] / "docs" / "recipes.md").read_text()
SECTIONS = {
    section.splitlines()[0]: re.findall(r"^```python\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    for section in re.split(r"^## ", RECIPES, flags=re.MULTILINE)[1:]
}
Check = Callable[[list[str]], Any]
CHECKS: dict[str, tuple[int, Check]] = {}
QUICK = ("Replicas alone", "Evaluate", "Lengths that change")
# Sections that say what a graph saves or reduces, or that differentiate something else than Dynamo's graph.
WITH_PASSES = (
    "Activation checkpointing", "Gather from few ranks in backward", "Pipeline stages", "Evaluate", "Branches and loops",
    "Gradients of gradients",
)  # fmt: skip


def section(title: str, ranks: int = 2) -> Callable[[Check], Check]:
    """The decorated function runs the blocks of that section on so many ranks, and asserts what they are for."""

    def register(check: Check) -> Check:
        CHECKS[title] = (ranks, check)
        return check

    return register


def play(block: str, **around: Any) -> dict[str, Any]:
    """Run a block among these names; all names afterwards."""
    names = {"torch": torch, "device": "cpu", **around}
    exec(block, names)
    return names


def sum_backward(unsharded: nn.Module, *steps: Tensor) -> None:
    """What ``model(batch).sum().backward()`` on every rank amounts to."""
    for tokens in steps:
        torch.stack([unsharded(batch).sum() for batch in tokens]).mean().backward()


def steps_of(unsharded: nn.Module, optim: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        sum_backward(unsharded, batches(step))
        optim.step()
        optim.zero_grad()


def same_grads(sharded: nn.Module, unsharded: nn.Module) -> None:
    assert_same_grads(getattr(sharded, "_orig_mod", sharded), unsharded, atol=1e-4)  # sums over many tokens


def trains(run: Any, unsharded: nn.Module, **places: int) -> None:
    train_and_compare(run, run._orig_mod, unsharded, steps=2, **places)


@section("Code that was written for torch's FSDP2")
def _written_for_fsdp2(blocks: list[str]) -> None:
    unsharded, model = twins()
    names = play(*blocks, model=model)
    assert isinstance(model, names["fsdp_compile"].FSDPModule)
    assert torch.distributed.fsdp.fully_shard is not fully_shard
    trains(names["model"], unsharded)
    assert num_graphs() == 1


@section("Replicas of shards", ranks=4)
def _replicas_of_shards(blocks: list[str]) -> None:
    unsharded, model = twins()
    names = play(*blocks, model=model, batches=[mine(0), mine(1)])
    assert model.head.weight.placements == (Replicate(), Shard(0))
    sum_backward(unsharded, batches(0), batches(1))
    same_grads(names["model"], unsharded)


@section("Gather from few ranks in backward", ranks=4)
def _reshard_to_few(blocks: list[str]) -> None:
    unsharded, model = twins(lambda: Stack(1))
    run = play(*blocks, model=model)["model"]
    out = run(mine())
    saved = [tuple(tensor.shape) for tensor in out.grad_fn.saved_tensors]
    # Of the 33 rows of the block's first linear; a shard has 9 at most.
    assert [saved.count((rows, 16)) for rows in (33, 17, 16)] == [[0, 1, 0], [0, 0, 1]][dist.get_rank() % 2]
    trains(run, unsharded)


@section("Replicas alone")
def _replicas(blocks: list[str]) -> None:
    unsharded, model = twins()
    run = play(*blocks, model=model)["model"]
    trains(run, unsharded)
    with Wire() as wire:
        run(mine()).sum().backward()
    assert wire.calls["all_reduce"] and not wire.calls["gather"]


@section("Tensor parallelism", ranks=4)
def _tensor_parallel(blocks: list[str]) -> None:
    unsharded, model = twins(lambda: Stack(2, block=EvenBlock))
    run = play(*blocks, model=model)["model"]
    assert model.layers[0].down.weight.placements == (Shard(0), Shard(1))
    trains(run, unsharded, place=dist.get_rank() // 2, num_places=2)


@section("Parameters on the whole mesh", ranks=4)
def _whole_mesh(blocks: list[str]) -> None:
    unsharded, model = twins(lambda: Stack(2, block=EvenBlock))
    play(*blocks, model=model, batch=batches(0)[dist.get_rank() // 2])
    assert model.layers[0].down.weight.placements == (Shard(0), Shard(1))
    assert model.layers[0].down.bias.placements == (Shard(0), Replicate())
    sum_backward(unsharded, batches(0)[:2])
    same_grads(model, unsharded)


@section("Experts on a mesh of their own", ranks=4)
def _experts(blocks: list[str]) -> None:
    unsharded, model = twins()
    run = play(*blocks, model=model)["model"]
    assert model.layers[0].up.bias.device_mesh.size() == 2 and model.layers[0].down.bias.device_mesh.size() == 4
    loss_of(run(mine())).backward()
    first = dist.get_rank() // 2 * 2
    reference_backward(unsharded, batches(0)[first : first + 2])
    among_few = {fqn: param.grad for fqn, param in unsharded.named_parameters() if ".up." in fqn}
    unsharded.zero_grad()
    reference_backward(unsharded, batches(0))
    for fqn, grad in among_few.items():
        assert not torch.allclose(unsharded.get_parameter(fqn).grad, grad, rtol=1e-3)
        unsharded.get_parameter(fqn).grad = grad
    same_grads(model, unsharded)


@section("Pipeline stages", ranks=4)
def _pipeline(blocks: list[str]) -> None:
    unsharded, model = twins()
    stage, place = divmod(dist.get_rank(), 2)
    batch, target = batches(0)[place], batches(1)[place]
    names = play(*blocks, model=model, batch=batch, target=target)
    graphs = []
    for _ in range(2):
        names["chunk"].zero_grad()
        with Wire() as wire:
            names["schedule"].step(*[batch][stage:], target=target)
        graphs.append(num_graphs())
    for tokens, targets in zip(batches(0)[:2], batches(1)[:2]):
        (names["loss_fn"](unsharded(tokens), targets) / 2).backward()
    theirs = dict(zip(model.parameters(), unsharded.parameters()))
    for ours in names["chunk"].parameters():
        torch.testing.assert_close(full(ours.grad), theirs[ours].grad, atol=1e-6, rtol=1e-4)
    assert wire.reductions == len(names["chunk"]) == (2 if stage == 0 else 3)
    assert 0 < graphs[0] == graphs[1]


@section("Activation checkpointing")
def _checkpointing(blocks: list[str]) -> None:
    saved = []
    for block in blocks:
        torch._dynamo.reset()
        unsharded, model = twins(lambda: Stack(1))
        out = play(block, model=model)["model"](mine())
        assert not {(16, 33), (33, 16)} & set(saved_weights(model, out))
        saved.append(sum(tensor.shape == (28, 33) for tensor in out.grad_fn.saved_tensors))
        with Wire() as wire:
            loss_of(out).backward()
        assert wire.calls["gather"] <= 6  # of the block's parameters each once at most; the root keeps its own
        reference_backward(unsharded, batches(0))
        for ours, theirs in zip(model.parameters(), unsharded.parameters()):
            torch.testing.assert_close(full(ours.grad), theirs.grad, atol=1e-6, rtol=1e-4)
    assert saved == [0, 1]  # the product of the block's first linear


@section("Clipping and the optimizer in the compiled step")
def _whole_step(blocks: list[str]) -> None:
    unsharded, model = twins(lambda: Stack(1))
    try:
        names = play(*blocks, model=shard(model), batch=mine())
    finally:
        torch._dynamo.config.compiled_autograd = False
    sum_backward(unsharded, batches(0))
    norm = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 1.0)
    torch.optim.SGD(unsharded.parameters(), lr=0.1).step()
    assert norm > 1
    torch.testing.assert_close(full(names["norm"]), norm, atol=1e-4, rtol=1e-4)
    assert_same_params(model, unsharded, atol=1e-5)
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] == 1


@section("A compiled optimizer")
def _compiled_optimizer(blocks: list[str]) -> None:
    unsharded, model = twins()
    names = play(*blocks, model=torch.compile(shard(model)), batch=mine())
    before = num_graphs()
    assert before == 2  # the model's, and the update
    steps_of(unsharded, torch.optim.AdamW(unsharded.parameters(), lr=1e-3), 0, 1)
    names["model"](mine(1)).sum().backward()
    with Wire() as wire:
        names["update"]()
    assert not wire.calls and num_graphs() == before
    assert_same_params(model, unsharded, atol=1e-5)


@section("From the meta device, by a policy")
def _from_the_meta_device(blocks: list[str]) -> None:
    torch.manual_seed(0)
    names = play(blocks[0], make_model=Stack)
    model = names["model"]
    unsharded = Stack()
    torch.manual_seed(0)
    for module in unsharded.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    names = play(blocks[1], model=model, batch=mine())
    sum_backward(unsharded, batches(0))
    norm = nn.utils.clip_grad_norm_(unsharded.parameters(), 1.0)
    torch.testing.assert_close(names["norm"], norm)
    same_grads(model, unsharded)
    with torch.no_grad():
        unsharded.layers[0].up.weight[0] = 0
    assert_same_params(model._orig_mod, unsharded)


@section("Save, load, resume")
def _save_and_load(blocks: list[str]) -> None:
    unsharded, model = twins()
    folder = shared_folder()
    try:
        names = play(blocks[0], model=torch.compile(shard(model)), batch=mine(), folder=folder)
        saved = names["optim"].state
        steps_of(unsharded, torch.optim.AdamW(unsharded.parameters(), lr=1e-3), 0)
        assert_same_params(model, unsharded, atol=1e-5)
        again = shard(Stack())  # of other values, and not compiled
        names = play(blocks[1], model=again, folder=folder)
        assert names["step"] == 1
        assert_same_params(again, unsharded, atol=1e-5)
        for param, loaded in zip(model.parameters(), again.parameters()):
            for name, value in names["optim"].state[loaded].items():
                torch.testing.assert_close(full(value), full(saved[param][name]), atol=0, rtol=0)
        model = shard(Stack())
        play(blocks[2], model=torch.compile(again), folder=folder)
        play(blocks[3], model=torch.compile(model), folder=folder)
        assert_same_params(model, unsharded, atol=1e-5)
        unsharded.load_state_dict(torch.load(folder / "model.pt"))  # names and shapes are its own
        model = shard(Stack())
        play(blocks[4], model=torch.compile(model), folder=folder)
        assert_same_params(model, unsharded, atol=1e-5)
        play(blocks[5], model=torch.compile(model), folder=folder, batch=mine())
        assert (folder / "2" / ".metadata").exists()
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


def shared_folder() -> Path:
    """One new folder for all ranks."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return Path(str(told[0]))


@section("Weights that stream")
def _weights_that_stream(blocks: list[str]) -> None:
    unsharded, model = twins()
    run = torch.compile(shard(model))
    sent = play(blocks[0], model=run)["sent"]
    expected = {name: one.bfloat16() for name, one in unsharded.state_dict().items()}
    torch.testing.assert_close(sent, expected, atol=0, rtol=0)
    again = shard(Stack())
    play(blocks[1], model=again, sent=sent)
    assert_same_params(again, unsharded.bfloat16().float(), atol=0, rtol=0)


@section("Hugging Face folders")
def _hugging_face(blocks: list[str]) -> None:
    import transformers

    folder = shared_folder()
    sizes = {"hidden_size": 16, "intermediate_size": 33, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    unsharded = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, use_cache=False, **sizes))
    try:
        if dist.get_rank() == 0:
            unsharded.save_pretrained(folder)
        dist.barrier()
        names = play(blocks[0], folder=folder)
        tokens = mine()
        logits = unsharded(input_ids=tokens).logits
        with torch.no_grad():
            torch.testing.assert_close(names["compiled"](input_ids=tokens).logits, logits, atol=1e-5, rtol=1e-5)
        play(blocks[1], model=names["compiled"], folder=folder)
        again = transformers.LlamaForCausalLM.from_pretrained(folder / "trained")
        assert_same_params(names["model"], again, atol=0, rtol=0)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


@section("A moving average of the model")
def _moving_average(blocks: list[str]) -> None:
    unsharded, model = twins()
    run = torch.compile(shard(model), fullgraph=True)
    names = play(*blocks, model=run, batches=[mine(0), mine(1)])
    expected = AveragedModel(unsharded, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optim = torch.optim.AdamW(unsharded.parameters(), lr=1e-3)
    for step in range(2):
        steps_of(unsharded, optim, step)
        expected.update_parameters(unsharded)
    torch.testing.assert_close(names["output"], expected(mine(1)), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(names["output"], unsharded(mine(1)), atol=1e-4)
    assert num_graphs() == 2  # the model's, and under no_grad the average's
    with Wire() as wire:
        names["average"].update_parameters(run)
    assert not wire.calls


@section("A frozen teacher")
def _teacher(blocks: list[str]) -> None:
    unsharded, model = twins()
    frozen = copy.deepcopy(unsharded)
    names = play(*blocks, model=shard(model), batches=[mine(0), mine(1)])
    optim = torch.optim.AdamW(unsharded.parameters(), lr=1e-2)
    for step in range(2):
        for tokens in batches(step):
            target = nn.functional.log_softmax(frozen(tokens), dim=-1).detach()
            logits = unsharded(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
            student = nn.functional.log_softmax(logits, dim=-1)
            loss = loss + nn.functional.kl_div(student, target, reduction="batchmean", log_target=True)
            (loss / len(batches(step))).backward()
        optim.step()
        optim.zero_grad()
    assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)
    assert_same_params(names["teacher"], frozen, atol=0, rtol=0)
    assert not any(param.requires_grad for param in names["teacher"].parameters())


def steps_alike(blocks: list[str], make: Callable[[nn.Module, dict[str, Any]], list[torch.optim.Optimizer]]) -> Any:
    """Compare two steps of the blocks' optimizer, to the bit, with those of ``make`` on the unsharded model.

    Return the collectives that a third step sends.
    """
    unsharded, model = twins()
    names = play(*blocks, model=torch.compile(shard(model)), batch=mine())
    optims = make(unsharded, names)
    for step in range(2):
        for param, other in zip(model.parameters(), unsharded.parameters()):
            other.grad = full(param.grad).clone()
        for one in optims:
            one.step()
        if step:  # the blocks did the first
            names["optim"].step()
    assert_same_params(model, unsharded, atol=0, rtol=0)
    with Wire() as wire:
        names["optim"].step()
    return wire.calls


@section("Muon")
def _muon(blocks: list[str]) -> None:
    def theirs(unsharded: nn.Module, names: dict[str, Any]) -> list[torch.optim.Optimizer]:
        hidden, others = (group["params"] for group in muon_groups(unsharded))
        return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]

    assert steps_alike(blocks, theirs) == {"all_to_all": 2}


@section("SOAP, Shampoo and Adafactor")
def _soap(blocks: list[str]) -> None:
    steps_alike(blocks, lambda unsharded, names: [names["SOAP"](unsharded.named_parameters(), lr=3e-3)])


@section("Optimizer states in the host's memory")
def _states_on_host(blocks: list[str]) -> None:
    assert not steps_alike(blocks, lambda unsharded, names: [torch.optim.AdamW(unsharded.parameters(), lr=3e-4)])


@section("Which optimizers")
def _which_optimizers(blocks: list[str]) -> None:
    def theirs(unsharded: nn.Module, names: dict[str, Any]) -> list[torch.optim.Optimizer]:
        matrices, vectors = ([one for one in unsharded.parameters() if (one.ndim == 2) is is_matrix] for is_matrix in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=1e-3)]

    assert not steps_alike(blocks, theirs)


@section("An optimizer in backward")
def _optimizer_in_backward(blocks: list[str]) -> None:
    unsharded, model = twins()
    play(*blocks, model=model, batch=mine())
    assert all(param.grad is None for param in model.parameters())
    assert num_graphs() == 1  # equal blocks share it
    steps_of(unsharded, torch.optim.AdamW(unsharded.parameters(), lr=1e-3), 0)
    assert_same_params(model, unsharded, atol=1e-5)


@section("Shards on the CPU")
def _offload(blocks: list[str]) -> None:
    unsharded, model = twins()
    run = play(*blocks, model=model)["model"]
    trains(run, unsharded)
    assert {param.device.type for param in model.parameters()} == {"cpu"}


@section("A frozen base with adapters")
def _adapters(blocks: list[str]) -> None:
    model = Stack(2)
    torch.manual_seed(1)
    names = play(*blocks, model=model)
    unsharded = Stack(2).requires_grad_(False)
    for layer in unsharded.layers:
        layer.up, layer.down = names["Adapted"](layer.up), names["Adapted"](layer.down)
    unsharded.load_state_dict({fqn: full(tensor) for fqn, tensor in model.state_dict().items()})
    loss = loss_of(names["model"](mine()))
    with Wire() as wire:
        loss.backward()
    assert wire.reductions in (2, 2 * 4)  # two blocks of four adapters' weights: in a bucket, or each by itself
    reference_backward(unsharded, batches(0))
    assert sum(param.grad is not None for param in model.parameters()) == 2 * 4
    same_grads(model, unsharded)


@section("A tensor subclass says what travels")
def _subclass(blocks: list[str]) -> None:
    unsharded, model = twins()
    run = play(*blocks, model=model)["model"]
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
    for step in range(2):
        loss_of(run(mine(step))).backward()
        rounded = copy.deepcopy(unsharded)
        for layer in rounded.layers:
            layer.up.weight.data = layer.up.weight.data.to(torch.bfloat16).float()
        reference_backward(rounded, batches(step))
        assert_same_grads(model, rounded)
        for param, of_rounded in zip(unsharded.parameters(), rounded.parameters()):
            param.grad = of_rounded.grad
        for optim in optims:
            optim.step()
            optim.zero_grad()
    for ours, theirs in zip(model.layers, unsharded.layers):
        assert type(ours.up.weight.to_local()).__name__ == "SentAsBf16"
        torch.testing.assert_close(full(ours.up.weight), theirs.up.weight, atol=1e-4, rtol=1e-3)


@section("Divide gradients by a number of your own")
def _divide(blocks: list[str]) -> None:
    unsharded, model = twins()
    play(*blocks, model=shard(model), batch=mine())
    torch.stack([unsharded(tokens).sum() for tokens in batches(0)]).sum().div(batches(0).numel()).backward()
    same_grads(model, unsharded)


@section("Do something to gradients on their way")
def _own_reduction(blocks: list[str]) -> None:
    for number, block in enumerate(blocks):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        unsharded, model = twins()
        run = play(block, model=model)["model"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(mine()).sum().backward()
        warned = [str(one.message).split(" runs eagerly")[0] for one in caught if " runs eagerly" in str(one.message)]
        assert warned == [["layers.0 (Block)"], [f"layers.{index} (Block)" for index in range(2)]][number]
        assert num_graphs() >= 2  # what stands around them
        sum_backward(unsharded, batches(0))
        if number == 0:
            sums = [2 * param.grad for param in unsharded.layers[0].parameters()]
            assert any(summed.abs().max() > 1 for summed in sums)
            for param, summed in zip(unsharded.layers[0].parameters(), sums):
                param.grad = summed.clamp(-1, 1) / 2
            same_grads(model, unsharded)
        else:
            assert_same_grads(model, unsharded, atol=0.02, rtol=0.02)
            with pytest.raises(AssertionError, match=r"layers\.0"):  # rounded on the way
                same_grads(model, unsharded)


@section("Evaluate")
def _evaluate(blocks: list[str]) -> None:
    unsharded, model = twins()
    run = torch.compile(shard(model), fullgraph=True)
    for _ in range(2):
        names = play(*blocks, model=run, batch=mine())
        torch.testing.assert_close(names["output"], unsharded(mine()))
        assert model.training and not names["output"].requires_grad
    assert num_graphs() == 1


@section("Lengths that change")
def _lengths(blocks: list[str]) -> None:
    unsharded, model = twins()
    lengths = (7, 5, 6)
    run = torch.compile(shard(model), fullgraph=True)
    play(*blocks, model=run, batches=[mine(length)[:, :length].clone() for length in lengths])
    assert num_graphs() == 1
    sum_backward(unsharded, *(batches(length)[:, :, :length] for length in lengths))
    same_grads(model, unsharded)


@section("Gradients of gradients")
def _double_backward(blocks: list[str]) -> None:
    unsharded, model = twins(Block)
    run = torch.compile(fully_shard(model), fullgraph=True)
    inputs = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    play(*blocks, model=run, batch=inputs[dist.get_rank()])
    for one in inputs:
        one = one.clone().requires_grad_()
        loss = unsharded(one).sum()
        (slope,) = torch.autograd.grad(loss, one, create_graph=True)
        ((loss + slope.pow(2).sum()) / 2).backward()
    same_grads(model, unsharded)
    one = inputs[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(run(one).sum(), one, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        slope.pow(2).sum().backward()


@section("Branches and loops")
def _branches_part(blocks: list[str]) -> None:
    torch.manual_seed(0)
    scale = 100.0 if dist.get_rank() else 1.0
    names = play(blocks[0], fully_shard=fully_shard, x=scale * torch.ones(2, 8))
    gated = names["gated"]
    for layer in (gated.near, gated.far):  # each was taken by one of two ranks
        torch.testing.assert_close(full(layer.bias.grad), torch.ones(8))


def _run(title: str) -> None:
    _, check = CHECKS[title]
    backend = "passes" if title in WITH_PASSES else "eager"
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        check(SECTIONS[title])


@pytest.mark.parametrize(
    "title", [title if title in QUICK else pytest.param(title, marks=pytest.mark.more) for title in SECTIONS]
)
def test_a_recipe_does_what_it_says(two_ranks: Ranks, four_ranks: Ranks, title: str) -> None:
    """Each way of training has its row on Inductor in tests/matrix: here the code has to do what the section says."""
    assert title in CHECKS, f"no test runs the section {title!r} of docs/recipes.md"
    ranks, _ = CHECKS[title]
    {2: two_ranks, 4: four_ranks}[ranks].run(_run, title)


def test_every_section_has_a_block_and_every_check_a_section() -> None:
    assert all(SECTIONS.values()) and set(CHECKS) <= set(SECTIONS)
