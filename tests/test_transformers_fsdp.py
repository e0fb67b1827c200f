"""transformers' own FSDP2, ``DistributedConfig(fsdp_size=...)``, and its expert and tensor parallel layers, on our units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp_compile
from tests.comparing import full
from tests.compiling import num_graphs
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks

TINY = {"vocab_size": 38, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2}
KINDS: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {"head_dim": 8}),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, {"num_local_experts": 4}),
    "qwen2_moe": (
        transformers.Qwen2MoeForCausalLM,
        transformers.Qwen2MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
}


def _trained_by_its_fsdp2(folder: Path, kind: str, sizes: dict[str, int], how: str = "whole") -> None:
    from transformers.distributed import DistributedConfig

    cls, config, sizes_of_kind = KINDS[kind]
    unsharded = cls(config(**TINY, **sizes_of_kind))
    if dist.get_rank() == 0:
        unsharded.save_pretrained(folder)
    dist.barrier()
    with fsdp_compile.adopt():
        model = cls.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    assert isinstance(model, fsdp_compile.FSDPModule) and model._is_fsdp_managed_module is True
    model.train()
    run = model if how == "eager" else torch.compile(model, backend="aot_eager", fullgraph=how == "whole")
    tokens = torch.randint(0, 38, (dist.get_world_size() // sizes.get("tp_size", 1), 8), generator=torch.Generator().manual_seed(1))
    mine = tokens[dist.get_rank() // sizes.get("tp_size", 1)][None]
    run(input_ids=mine, labels=mine, use_cache=False).loss.backward()
    unsharded.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for (fqn, param), expected in zip(model.named_parameters(), unsharded.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad, atol=1e-6, rtol=1e-4, msg=fqn)
    assert how != "whole" or num_graphs() == 1


@pytest.mark.parametrize(
    "sizes", [{"fsdp_size": 2}, pytest.param({"dp_replicate_size": 2, "fsdp_size": 1}, marks=pytest.mark.more)]
)
def test_transformers_own_fsdp2_compiles_to_trained_by_its_fsdp2(two_ranks: Ranks, tmp_path: Path, sizes: dict[str, int]) -> None:
    two_ranks.run(_trained_by_its_fsdp2, tmp_path, "llama", sizes)


@pytest.mark.more
def test_its_tensor_parallel_layers_compile_to_trained_by_its_fsdp2(four_ranks: Ranks, tmp_path: Path) -> None:
    """Qwen3's norms in attention register post-accumulate hooks in forward: each rank has its own heads."""
    four_ranks.run(_trained_by_its_fsdp2, tmp_path, "qwen3", {"fsdp_size": 2, "tp_size": 2})


@pytest.mark.more
@pytest.mark.parametrize(
    "kind, sizes, how",
    [("qwen2_moe", {}, "whole"), ("mixtral", {"ep_size": 2}, "eager"), pytest.param("mixtral", {"ep_size": 2}, "in parts", marks=pytest.mark.slow)],
)
def test_its_mixtures_of_experts(two_ranks: Ranks, tmp_path: Path, kind: str, sizes: dict[str, int], how: str) -> None:
    """Its exchange of tokens between ranks has sizes that depend on the data, where no graph goes on."""
    two_ranks.run(_trained_by_its_fsdp2, tmp_path, kind, {"fsdp_size": 2, **sizes}, how)


@pytest.mark.slow
def test_its_experts_on_some_ranks_are_sharded_over_the_others(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(_trained_by_its_fsdp2, tmp_path, "mixtral", {"fsdp_size": 4, "ep_size": 2}, "in parts")


@contextmanager
def _local(module: nn.Module) -> Iterator[None]:
    found: Any = {name: param for name, param in module.named_parameters(recurse=False) if isinstance(param, DTensor)}
    module._parameters.update({name: param.to_local() for name, param in found.items()})
    try:
        yield
    finally:
        module._parameters.update(found)


class Experts(nn.Module):
    """A layer that puts local tensors in its parameters' places while its forward runs.

    transformers' ``_use_local_dtensor_params`` does so.
    """

    def __init__(self, experts_mesh: Any, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 8, 8), experts_mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        with _local(self):
            return self._computed(x)

    def _computed(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.einsum("td,edf->tef", x, self.weight).sum(1)


@pytest.mark.parametrize(
    "backend, breaks",
    [(None, False), *(pytest.param(*one, marks=pytest.mark.compat) for one in (("passes", False), ("aot_eager", True)))],
)
@on_two_ranks
def test_layers_that_write_local_tensors_into_parameters(backend: str | None, breaks: bool) -> None:
    """The mesh that shards the experts has two ranks, then one; their gradients are divided by a factor.

    With a graph break, full DTensors are in the shards' places from then on to the end of the forward.
    """
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "ep"))

        def trained(shard: Callable[..., Any], backend: str | None) -> tuple[list[Tensor], Tensor]:
            experts = Experts(mesh["ep"], breaks)  # noqa: B023
            shard(experts, mesh=mesh["fsdp"])  # noqa: B023
            model = nn.Sequential(nn.Linear(8, 8), experts)
            shard(model, mesh=mesh["fsdp"])  # noqa: B023
            experts.set_gradient_divide_factor(2.0)  # type: ignore[operator]
            if backend is not None:
                model.compile(backend=backend, fullgraph=not breaks)
            outputs = [model(torch.ones(3, 8)) for _ in range(2)]
            sum(outputs).sum().backward()  # type: ignore[union-attr]
            weight: Any = experts.weight
            assert weight is next(experts.parameters())
            with torch.no_grad():
                outputs.append(model(torch.ones(3, 8)))
            return outputs, weight.grad.to_local()

        expected, expected_grad = trained(torchs_fully_shard, None)
        got, grad = trained(fsdp_compile.fully_shard, backend)
        torch.testing.assert_close((got, grad), (expected, expected_grad))


class Written(nn.Sequential):
    pass


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_module_that_is_no_unit_has_its_class_name() -> None:
    def described(model: nn.Module) -> list[Any]:
        return [(type(one).__name__, type(one).__qualname__, repr(one)) for one in model.modules()]

    def build() -> nn.Module:
        return nn.Sequential(Written(nn.Linear(2, 2), nn.LSTM(2, 2), nn.LayerNorm(2)))

    sharded, theirs = fsdp_compile.fully_shard(build()), torchs_fully_shard(build())
    assert [type(one).__module__ for one in sharded.modules()] == [type(one).__module__ for one in build().modules()]
    assert described(sharded) == described(theirs)[:1] + described(build())[1:] != described(build())
