"""Folders of Hugging Face: read into shards, each rank its own rows, and written as transformers reads them."""

from __future__ import annotations

import copy
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_compile
from fsdp_compile import fully_shard, load_pretrained, save_pretrained
from fsdp_compile.hugging_face.safetensors import File, Writer
from tests.comparing import full
from tests.compiling import compiled, num_graphs
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.processes import AnonymousPeak
from tests.ranks import Ranks

_SMALL = {"vocab_size": 37, "use_cache": False}


_LLAMA = {"hidden_size": 24, "intermediate_size": 42, "num_hidden_layers": 2, "num_attention_heads": 2}
_LLAMA |= {"num_key_value_heads": 1, "max_position_embeddings": 32}
_MIXTRAL = {**_LLAMA, "hidden_size": 32, "intermediate_size": 48, "num_experts_per_tok": 2}
_MIXTRAL |= {"num_local_experts": 12}  # of which a file has the 11th before the 3rd
_GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32}
_T5 = {"d_model": 24, "d_ff": 42, "num_layers": 2, "num_heads": 2, "d_kv": 12, "decoder_start_token_id": 0}
_TIED = {**_LLAMA, "tie_word_embeddings": True}

# A model's class, its config, and the class of its blocks.
MODELS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, _LLAMA, "LlamaDecoderLayer"),
    "llama, tied": (transformers.LlamaForCausalLM, transformers.LlamaConfig, _TIED, "LlamaDecoderLayer"),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, _GPT2, "GPT2Block"),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, _MIXTRAL, "MixtralDecoderLayer"),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config, _T5, "T5Block"),
}


def built(name: str) -> Any:
    cls, config, sizes, _ = MODELS[name]
    return cls(config(**_SMALL, **sizes)).eval()


def made(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = built(name)
    for param in model.parameters():  # norms too
        param.data += 0.01 * torch.randn_like(param)
    return model


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return built(name)


def sharded(model: Any, name: str, **kwargs: Any) -> Any:
    return fsdp_compile.auto_shard(model, MODELS[name][3], **kwargs)


def inputs(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 37, (2, 9), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def train(run: Any, model: nn.Module, ranks: list[int]) -> list[float]:
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = torch.stack([run(**inputs(rank)).loss for rank in ranks]).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def saved(model: Any, folder: Path, **kwargs: Any) -> Any:
    """The model, which rank 0 has saved as transformers does."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder, **kwargs)
    dist.barrier()
    return model


def assert_same_values(ours: nn.Module, theirs: nn.Module, atol: float = 0.0) -> None:
    expected = dict(theirs.named_parameters())
    names = [name for name, _ in ours.named_parameters()]
    assert names == list(expected)
    found = {name: full(param).detach() for name, param in ours.named_parameters()}
    torch.testing.assert_close(found, {name: param.detach() for name, param in expected.items()}, atol=atol, rtol=0)


def check_round_trip(name: str, folder: Path, backend: str) -> None:
    theirs = saved(made(name), folder / "theirs", max_shard_size="20KB")
    assert len(list((folder / "theirs").glob("*.safetensors"))) > 2
    model = sharded(on_meta(name), name)
    assert load_pretrained(model, f"{folder}/theirs") is model
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert_same_values(model, theirs)
    batch = inputs(0)
    torch.testing.assert_close(model(**batch).logits, theirs(**batch).logits, atol=1e-5, rtol=1e-5)

    run = compiled(model, backend, fullgraph=False)
    train(run, model, [dist.get_rank()])
    train(theirs, theirs, list(range(dist.get_world_size())))
    assert_same_values(model, theirs, atol=1e-5)
    graphs = num_graphs()
    save_pretrained(run, f"{folder}/ours", max_shard_size="30KB")
    assert num_graphs() == graphs
    assert len(list((folder / "ours").glob("*.safetensors"))) > 1 and not list((folder / "ours").glob("*.partial"))
    again = MODELS[name][0].from_pretrained(f"{folder}/ours").eval()
    assert_same_values(model, again)
    torch.testing.assert_close(model(**batch).logits, again(**batch).logits, atol=1e-5, rtol=1e-5)
    # Ours reads ours, onto another way of cutting, and into a model that has values and is not sharded.
    for other in (sharded(made(name, seed=1), name, shard_placement_fn=_columns), made(name, seed=2)):
        load_pretrained(other, f"{folder}/ours")
        assert_same_values(other, again)


def _columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


@pytest.mark.filterwarnings("ignore:..coder.block.[01] .T5Block. returned a view tensor")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama, tied", "eager"),  # tests/matrix has one on Inductor
        pytest.param("llama", "inductor", marks=pytest.mark.slow),
        *(pytest.param(name, "aot_eager", marks=pytest.mark.slow) for name in ("gpt2", "mixtral", "t5")),
    ],
)
def test_a_folder_of_transformers_is_trained_and_read_by_transformers_again(
    two_ranks: Ranks, tmp_path: Path, name: str, backend: str
) -> None:
    two_ranks.run(check_round_trip, name, tmp_path, backend)


def _with_experts_of_one_name() -> Any:
    text = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"vocab_size": 37, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 16}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLMoeForConditionalGeneration(config).eval()


@on_two_ranks
def test_what_is_converted_under_its_own_name_is(tmp_path: Path) -> None:
    """The published folders have them transposed, those that transformers 5 writes have not; both by the model's names."""
    transposed, written = tmp_path / "transposed", tmp_path / "written"
    theirs = saved(_with_experts_of_one_name(), written)
    if dist.get_rank() == 0:
        shutil.copytree(written, transposed)
        [file] = transposed.glob("*.safetensors")
        state = safetensors.torch.load_file(file)
        for name in [one for one in state if ".experts." in one]:
            state[name] = state[name].transpose(1, 2).contiguous()
        safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    dist.barrier()
    for where in (transposed, written):
        assert_same_values(type(theirs).from_pretrained(where), theirs)
        with torch.device("meta"):
            model = fsdp_compile.auto_shard(_with_experts_of_one_name(), "Qwen3VLMoeTextDecoderLayer")
        load_pretrained(model, where)
        assert_same_values(model, theirs)
        save_pretrained(model, f"{where}/ours")
        assert_same_values(type(theirs).from_pretrained(f"{where}/ours"), theirs)


@pytest.mark.more
@on_four_ranks
def test_replicas_and_tensor_parallelism_take_their_parts(tmp_path: Path) -> None:
    theirs = saved(made("llama"), tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(on_meta("llama"), "llama", mesh=mesh)
    assert_same_values(load_pretrained(model, tmp_path), theirs)
    save_pretrained(model, f"{tmp_path}/ours")
    assert_same_values(transformers.LlamaForCausalLM.from_pretrained(f"{tmp_path}/ours"), theirs)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = on_meta("llama")
    for layer in model.model.layers:
        parallelize_module(
            layer.mlp,
            mesh["tp"],
            {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()},
        )
    sharded(model, "llama", mesh=mesh["dp"])
    assert_same_values(load_pretrained(model, tmp_path), theirs)
    save_pretrained(model, f"{tmp_path}/tp")
    assert_same_values(transformers.LlamaForCausalLM.from_pretrained(f"{tmp_path}/tp"), theirs)


@on_two_ranks
def test_dtypes_and_prefixes_are_as_from_pretrained_takes_them(tmp_path: Path) -> None:
    theirs = saved(made("llama"), tmp_path / "whole")
    halved = saved(copy.deepcopy(theirs).bfloat16(), tmp_path / "bf16")
    saved(theirs.model, tmp_path / "base")
    model = load_pretrained(sharded(on_meta("llama"), "llama"), f"{tmp_path}/bf16")
    assert_same_values(model, halved.float())
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    low = load_pretrained(sharded(on_meta("llama").bfloat16(), "llama"), f"{tmp_path}/whole")
    assert_same_values(low, copy.deepcopy(theirs).bfloat16())
    save_pretrained(load_pretrained(model, f"{tmp_path}/whole"), f"{tmp_path}/ours", dtype=torch.bfloat16)
    again = transformers.LlamaForCausalLM.from_pretrained(f"{tmp_path}/ours", dtype=torch.bfloat16)
    assert_same_values(again, copy.deepcopy(theirs).bfloat16())

    # A base model's folder into a model with a head, which it lacks, and the reverse, which has one too many.
    with pytest.raises(ValueError, match=r"is not of a LlamaForCausalLM like this: it lacks lm_head.weight\."):
        load_pretrained(sharded(on_meta("llama"), "llama"), f"{tmp_path}/base")
    model = load_pretrained(sharded(on_meta("llama"), "llama"), f"{tmp_path}/base", strict=False)
    head = full(model.lm_head.weight)
    assert 0.001 < head.std().item() < 0.1  # initialized, by the model's own rule
    heads = [torch.empty_like(head) for _ in range(2)]
    dist.all_gather(heads, head.detach())
    assert torch.equal(*heads)
    assert_same_values(model.model, theirs.model)
    with torch.device("meta"):
        base = transformers.LlamaModel(transformers.LlamaConfig(**_SMALL, **_LLAMA))
    fsdp_compile.auto_shard(base, "LlamaDecoderLayer")
    with pytest.raises(ValueError, match=r"it has lm_head.weight, which the model has not"):
        load_pretrained(base, f"{tmp_path}/whole")
    assert_same_values(load_pretrained(base, f"{tmp_path}/whole", strict=False), theirs.model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@on_two_ranks
def test_a_model_with_adapters_loads_its_base(tmp_path: Path) -> None:
    """A head that is trained beside adapters has the folder's values, and so has the one that it came from."""
    from peft import LoraConfig, get_peft_model

    theirs = saved(made("llama"), tmp_path / "theirs")
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], lora_dropout=0.0)
    model = get_peft_model(on_meta("llama"), config).eval()
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    fsdp_compile.auto_shard(model, "LlamaDecoderLayer")
    load_pretrained(model, tmp_path / "theirs")
    assert {name for name, param in model.named_parameters() if param.requires_grad} == trained
    heads = [full(param) for name, param in model.named_parameters() if "lm_head" in name]
    assert len(heads) == 2 and all(torch.equal(one, theirs.lm_head.weight) for one in heads)
    batch = inputs(0)
    torch.testing.assert_close(model(**batch).logits, theirs(**batch).logits, atol=1e-5, rtol=1e-5)
    adapters = {name: full(param) for name, param in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 8 and all(torch.isfinite(one).all() for one in adapters.values())
    assert all((one == 0).all() == ("lora_B" in name) for name, one in adapters.items())
    for one in (model, model.get_base_model()):  # by transformers' own add_adapter, too
        with pytest.raises(ValueError, match="has adapters of PEFT"):
            save_pretrained(one, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


class Wide(nn.Module):
    """100 MB in ten matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1600, 1600, bias=False) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def other_shape(folder: Path) -> Path:
    other = folder / f"other{dist.get_rank()}"
    other.mkdir(exist_ok=True)
    writer = Writer(other / "model.safetensors", {"layers.0.weight": (torch.float32, (2, 2))})
    writer.write(torch.ones(2, 2))
    writer.close()
    return other


@on_two_ranks
def test_no_whole_copy_is_in_a_ranks_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = 1600 * 1600 * 4
    if dist.get_rank() == 0:
        writer = Writer(path, {f"layers.{index}.weight": (torch.float32, (1600, 1600)) for index in range(10)})
        for index in range(10):
            writer.write(torch.full((1600, 1600), index + 1.0))
        writer.close()
    dist.barrier()
    with torch.device("meta"):
        model = Wide()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    small = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2, bias=False)])})
    load_pretrained(small, other_shape(tmp_path))  # imports what it needs
    with AnonymousPeak() as peak:
        load_pretrained(model, tmp_path)
    for index, layer in enumerate(model.layers):
        assert (full(layer.weight) == index + 1).all()
    shards, slack = 10 * size // 2, 2 << 20
    assert 0.99 * shards < peak.num_bytes < shards + size // 2 + slack, f"{peak.num_bytes} for {shards}"
    with AnonymousPeak() as peak:  # and a whole copy would be seen
        file = File(path)
        whole = [file.tensor(name).clone() for name in file.entries]
    assert peak.num_bytes > 0.99 * 10 * size
    del whole
    with AnonymousPeak() as peak:
        save_pretrained(model, f"{tmp_path}/ours", max_shard_size=2 * size)
    # One is written while the next comes: two whole ones, the shards that they are sent from, and a copy that gloo,
    # or who puts parts together, has of what is under way. Nothing orders the writer and gloo, so all may be at once.
    assert peak.num_bytes < 4 * size + slack, f"{peak.num_bytes} for {size}"
    with pytest.raises(ValueError, match=r"layers.0.weight has the shape \(1600, 1600\), and in .* \(2, 2\)"):
        load_pretrained(model, other_shape(tmp_path))


def test_files_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.int8),  # what follows is not aligned
        "c": torch.randn(2, 2).bfloat16(),
        "d": torch.tensor(True),
        "e": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "theirs")
    file = File(tmp_path / "theirs")
    writer = Writer(tmp_path / "ours", {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()})
    for one in tensors.values():
        writer.write(one)
    writer.close()
    theirs = load_file(tmp_path / "ours")
    ours = File(tmp_path / "ours")
    for name, one in tensors.items():
        for found in (file.tensor(name), theirs[name], ours.tensor(name)):
            assert found.dtype == one.dtype and torch.equal(found, one), name


def _file(path: Path, header: Any, num_bytes: int = 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return path


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"{", "its header is no JSON"),
        (b"[" * 100_000, "its header is no JSON"),
        ([], "its header is a list"),
        ({"w": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, "says of w what is no tensor"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}}, "says that w is outside of the file"),
        ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "says that w is outside of the file"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "says that w has 8 bytes, which"),
        (
            {name: {"dtype": "F32", "shape": [1], "data_offsets": [begin, begin + 4]} for name, begin in (("v", 0), ("w", 2))},
            "says that v and w overlap",
        ),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path: Path, header: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        File(_file(tmp_path / "model.safetensors", header))


def test_what_older_folders_have_besides_is_left_there(tmp_path: Path) -> None:
    theirs = made("llama")
    more = {**theirs.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    announced = {name: (one.dtype, tuple(one.shape)) for name, one in more.items()}
    writer = Writer(tmp_path / "model.safetensors", announced)
    for one in more.values():
        writer.write(one)
    writer.close()
    assert_same_values(load_pretrained(made("llama", seed=1), tmp_path), theirs)


def test_a_folder_without_weights_says_what_it_has(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors nor"):
        load_pretrained(model, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"It has pytorch_model.bin: convert it"):
        load_pretrained(model, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "../elsewhere"}}))
    with pytest.raises(ValueError, match=r"names \.\./elsewhere, which is outside of its folder"):
        load_pretrained(model, tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "model-1.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"lacks model-1.safetensors, which model.safetensors.index.json names"):
        load_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="max_shard_size='fsdp2' is no number of bytes"):
        save_pretrained(model, tmp_path, max_shard_size="fsdp2")
