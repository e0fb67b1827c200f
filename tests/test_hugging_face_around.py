"""Folders of Hugging Face where something is around: wrappers, adapters, other files, errors of one rank, kills."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp_compile
from fsdp_compile import fully_shard, load_pretrained, save_pretrained
from fsdp_compile.fsdp1 import FullyShardedDataParallel
from fsdp_compile.fsdp1.wrap import ModuleWrapPolicy
from fsdp_compile.hugging_face import save as saving
from fsdp_compile.hugging_face.safetensors import File, Writer
from fsdp_compile.workers import WorkerError
from tests.comparing import full
from tests.ranks import Ranks
from tests.test_hugging_face import assert_same_values, check_round_trip, inputs, made, on_meta, sharded, train

pytestmark = pytest.mark.more  # a part of test_hugging_face.py runs by default


def read(folder: str, cls: Any = transformers.LlamaForCausalLM) -> Any:
    """As transformers reads it, which says nothing of what it misses."""
    model, said = cls.from_pretrained(folder, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    return model.eval()


def given(folder: str, name: str = "llama") -> Any:
    """A model that is not sharded, and its folder."""
    theirs = made(name)
    if dist.get_rank() == 0:
        theirs.save_pretrained(f"{folder}/theirs")
    dist.barrier()
    return theirs


# --- wrappers -----------------------------------------------------------------------------------------------------------


def _checkpointed(model: Any) -> Any:
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = fully_shard(checkpoint_wrapper(layer))
    return fully_shard(model)


def _compiled_blocks(model: Any) -> Any:
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = torch.compile(fully_shard(layer), backend="aot_eager")
    return fully_shard(model)


def _fsdp1(model: Any) -> Any:
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def _compiled(model: Any) -> Any:
    return torch.compile(sharded(model, "llama"), backend="aot_eager")


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "checkpointed": _checkpointed,
    "compiled blocks": _compiled_blocks,
    "FSDP1": _fsdp1,
    "compiled": _compiled,
}


def _in_wrappers(folder: str, kind: str) -> None:
    theirs = given(folder)
    model = WRAPPED[kind](made("llama", seed=1) if kind == "FSDP1" else on_meta("llama"))
    assert load_pretrained(model, f"{folder}/theirs") is model
    batch = inputs("llama", 0)
    torch.testing.assert_close(model(**batch).logits, theirs(**batch).logits, atol=1e-5, rtol=1e-5)
    save_pretrained(model, f"{folder}/ours")
    assert_same_values(read(f"{folder}/ours"), theirs)


@pytest.mark.parametrize("kind", WRAPPED)
def test_what_wraps_modules_has_no_name_in_a_folder(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    two_ranks.run(_in_wrappers, str(tmp_path), kind)


def _with_full_params(folder: str) -> None:
    given(folder)
    model = sharded(made("llama", seed=1), "llama")
    for function in (load_pretrained, save_pretrained):
        words = r"cannot (load|save) weights while .* is a full parameter\. Do it outside of full_params"
        with fsdp_compile.full_params(model), pytest.raises(RuntimeError, match=words):
            function(model, f"{folder}/theirs")


def test_full_parameters_in_the_shards_places_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_with_full_params, str(tmp_path))


# --- adapters, frozen weights -------------------------------------------------------------------------------------------


def _trained_whole(folder: str) -> None:
    """A head that is trained beside adapters has the folder's values, and so has the one that it came from."""
    from peft import LoraConfig, get_peft_model

    theirs = given(folder)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(on_meta("llama"), config).eval()
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    fsdp_compile.auto_shard(model, "LlamaDecoderLayer")
    load_pretrained(model, f"{folder}/theirs")
    assert {name for name, param in model.named_parameters() if param.requires_grad} == trained
    heads = [full(param) for name, param in model.named_parameters() if "lm_head" in name]
    assert len(heads) == 2 and all(torch.equal(one, theirs.lm_head.weight) for one in heads)
    batch = inputs("llama", 0)
    torch.testing.assert_close(model(**batch).logits, theirs(**batch).logits, atol=1e-5, rtol=1e-5)
    for one in (model, model.get_base_model()):  # by transformers' own add_adapter, too
        with pytest.raises(ValueError, match="has adapters of PEFT"):
            save_pretrained(one, f"{folder}/ours")
    assert not Path(folder, "ours").exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it
def test_modules_that_are_trained_beside_adapters_are_read(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_trained_whole, str(tmp_path))


# --- what transformers puts together ------------------------------------------------------------------------------------


def _put_together(folder: str) -> None:
    """Its files have one weight of three of the model's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 42, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.NomicBertConfig(vocab_size=37, max_position_embeddings=32, **sizes)
    theirs = transformers.NomicBertModel(config)
    if dist.get_rank() == 0:
        theirs.save_pretrained(f"{folder}/theirs")
    dist.barrier()
    with torch.device("meta"):
        model: Any = transformers.NomicBertModel(config)
    fsdp_compile.auto_shard(model, 2000)
    load_pretrained(model, f"{folder}/theirs")
    assert_same_values(model, theirs)
    save_pretrained(model, f"{folder}/ours", max_shard_size="8KB")
    assert_same_values(read(f"{folder}/ours", transformers.NomicBertModel), theirs)
    [single] = Path(folder, "theirs").glob("*.safetensors")
    ours = {name for path in Path(folder, "ours").glob("*.safetensors") for name in File(path).entries}
    assert ours == set(File(single).entries) and any("Wqkv" in name for name in ours)


def test_what_transformers_writes_as_one_is_gathered_together(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_put_together, str(tmp_path))


# --- transformers' own functions, other numbers of ranks ----------------------------------------------------------------


def _by_transformers(folder: str) -> None:
    theirs = given(folder)
    with fsdp_compile.adopt():
        model = sharded(transformers.LlamaForCausalLM.from_pretrained(f"{folder}/theirs").eval(), "llama")
    run = torch.compile(model, backend="inductor")
    ours = train(run, model, "llama", [dist.get_rank()])
    train(theirs, theirs, "llama", [0, 1])
    assert ours[1] < ours[0]
    assert_same_values(model, theirs, atol=1e-5)
    whole = get_model_state_dict(run, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/whole", state_dict=whole)
    dist.barrier()
    assert_same_values(model, read(f"{folder}/whole"))
    save_pretrained(run, f"{folder}/ours")
    assert_same_values(read(f"{folder}/ours"), read(f"{folder}/whole"))
    again = load_pretrained(sharded(on_meta("llama"), "llama"), f"{folder}/whole")
    assert_same_values(again, read(f"{folder}/whole"))


def test_transformers_own_functions_go_with_sharded_models(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_by_transformers, str(tmp_path))


@pytest.fixture(scope="module")
def other_worlds() -> Iterator[dict[int, Ranks]]:
    made = {size: Ranks(size) for size in (1, 3)}
    yield made
    for ranks in made.values():
        ranks.stop()


@pytest.mark.parametrize("size", [1, 3])
def test_the_round_trip_on_one_rank_and_on_three(other_worlds: dict[int, Ranks], tmp_path: Path, size: int) -> None:
    other_worlds[size].run(check_round_trip, "llama", str(tmp_path), "aot_eager")


# --- what is in the folder ----------------------------------------------------------------------------------------------


def _over_what_was_there(folder: str) -> None:
    theirs = given(folder)
    path = Path(folder, "theirs")
    model = load_pretrained(sharded(on_meta("llama"), "llama"), path)
    if dist.get_rank() == 0:
        (path / "model_ema.safetensors").write_bytes(b"mine")
    dist.barrier()
    save_pretrained(model, path, max_shard_size="20KB", dtype=torch.bfloat16)  # which had one file
    assert not (path / "model.safetensors").exists() and (path / "model_ema.safetensors").read_bytes() == b"mine"
    again = read(str(path))
    assert again.dtype == torch.bfloat16  # config.json says so
    assert_same_values(again, made("llama").bfloat16())
    assert model.config.dtype != again.config.dtype, "only what is written"
    dist.barrier()
    save_pretrained(model, path)
    assert sorted(one.name for one in path.glob("*model*")) == ["model.safetensors", "model_ema.safetensors"]
    assert_same_values(read(str(path)), theirs)


def test_a_folder_is_written_over_and_what_is_not_of_it_stays(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_over_what_was_there, str(tmp_path))


def _mapped_by_class(folder: str) -> None:
    theirs: dict[str, Any] = {
        "neox": transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_NEOX)),
        "vit": transformers.ViTForImageClassification(transformers.ViTConfig(**_VIT)),
    }
    if dist.get_rank() == 0:
        for name, one in theirs.items():
            one.save_pretrained(f"{folder}/{name}")
    dist.barrier()
    with torch.device("meta"):
        neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_NEOX))
        vit = transformers.ViTModel(transformers.ViTConfig(**_VIT), add_pooling_layer=False)
    load_pretrained(fsdp_compile.auto_shard(neox), f"{folder}/neox")
    expected = read(f"{folder}/neox", transformers.GPTNeoXForCausalLM)
    assert_same_values(neox, expected)
    load_pretrained(fsdp_compile.auto_shard(vit), f"{folder}/vit", strict=False)  # it has a classifier besides
    assert_same_values(vit, transformers.ViTModel.from_pretrained(f"{folder}/vit", add_pooling_layer=False))
    save_pretrained(neox, f"{folder}/ours")
    assert File(Path(folder, "ours/model.safetensors")).entries.keys() == File(Path(folder, "neox/model.safetensors")).entries.keys()
    assert_same_values(read(f"{folder}/ours", transformers.GPTNeoXForCausalLM), expected)


_SMALL = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 42}
_NEOX = {**_SMALL, "vocab_size": 37, "max_position_embeddings": 32}
_VIT = {**_SMALL, "image_size": 16, "patch_size": 8}


def test_names_that_transformers_maps_by_class_are_those_of_the_class_that_was_sharded(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(_mapped_by_class, str(tmp_path))


def _generates_as_before(folder: str) -> None:
    given(folder)
    path = Path(folder, "theirs")
    said = transformers.GenerationConfig(do_sample=True, temperature=0.3, eos_token_id=[5, 7])
    if dist.get_rank() == 0:
        said.save_pretrained(path)
    dist.barrier()
    model = load_pretrained(sharded(on_meta("llama"), "llama"), path)
    expected = read(str(path)).generation_config
    assert expected.temperature == 0.3 and model.generation_config == expected
    save_pretrained(model, path)
    again = read(str(path)).generation_config
    assert (again.do_sample, again.temperature, again.eos_token_id) == (True, 0.3, [5, 7])


def test_how_a_folders_model_generates_is_read_and_not_written_over(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_generates_as_before, str(tmp_path))


def test_a_file_or_a_name_of_the_hub_in_a_folders_place(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match=r"model\.safetensors is a file\. Pass the folder"):
        load_pretrained(nn.Linear(2, 2), tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no folder org/model\. .*snapshot_download"):
        load_pretrained(nn.Linear(2, 2), "org/model")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name in names:
        writer = Writer(tmp_path / name, {"weight": (torch.float32, (2, 2))})
        writer.write(torch.ones(2, 2))
        writer.close()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip(("weight", "bias"), names))}))
    with pytest.raises(ValueError, match=r"weight is in .*00001-of-00002.safetensors and in .*00002-of-00002"):
        load_pretrained(nn.Linear(2, 2), tmp_path)


# --- what goes wrong on one rank ----------------------------------------------------------------------------------------


def _one_rank_fails(folder: str) -> None:
    theirs = given(folder)
    rank = dist.get_rank()
    model = sharded(made("llama", seed=1), "llama")
    path = f"{folder}/theirs" if rank == 0 else f"{folder}/elsewhere"
    error, words = [
        (RuntimeError, r"load_pretrained: rank 1 raised FileNotFoundError: There is no folder .*elsewhere\."),
        (FileNotFoundError, r"There is no folder .*elsewhere\. .*snapshot_download"),
    ][rank]
    began = time.monotonic()
    with pytest.raises(error, match=words):
        load_pretrained(model, path)
    assert_same_values(model, made("llama", seed=1))

    def write(self: Any, tensor: Any) -> None:
        raise OSError("No space left on device")

    error, words = [(RuntimeError, "save_pretrained: rank 1 raised OSError: No space"), (OSError, "No space")][rank]
    with mock.patch.object(Writer, "write", write if rank == 1 else Writer.write), pytest.raises(error, match=words):
        save_pretrained(model, f"{folder}/theirs", max_shard_size="20KB")
    assert_same_values(read(f"{folder}/theirs"), theirs)
    with pytest.raises(ValueError, match=r"ranks . and . have different models, of which one folder"):
        save_pretrained(model.model if rank else model, f"{folder}/theirs")
    assert_same_values(read(f"{folder}/theirs"), theirs)
    assert time.monotonic() - began < 30, "no rank waited for the other"
    save_pretrained(model, f"{folder}/theirs")
    assert_same_values(model, read(f"{folder}/theirs"))


def test_what_one_rank_raises_all_raise_and_the_folder_is_as_before(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_one_rank_fails, str(tmp_path))


def _killed_while_saving(folder: str, when: str) -> None:
    given(folder)
    model = sharded(made("llama", seed=1), "llama")

    def die(*args: Any) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    put, replace = saving._put_in_place, os.replace
    if when == "everything is written":
        put = die  # type: ignore[assignment]
    else:
        def replace(*args: Any) -> None:  # type: ignore[misc]
            os.rename(*args)
            die()
    with mock.patch.object(saving, "_put_in_place", put), mock.patch.object(os, "replace", replace):
        save_pretrained(model, f"{folder}/theirs", max_shard_size="20KB")


@pytest.mark.parametrize("when", ["everything is written", "one file is in its place"])
def test_a_kill_while_saving_leaves_what_was_there_or_nothing_that_loads(
    two_ranks: Ranks, tmp_path: Path, when: str
) -> None:
    with pytest.raises(WorkerError, match="rank 0 ended with SIGKILL"):
        two_ranks.run(_killed_while_saving, str(tmp_path), when)
    path = tmp_path / "theirs"
    assert list(path.glob("*.partial"))
    if when == "everything is written":
        assert_same_values(read(str(path)), made("llama"))
        assert_same_values(load_pretrained(made("llama", seed=2), path), made("llama"))
        return
    assert list(path.glob("model-00001-*.safetensors"))
    with pytest.raises(FileNotFoundError, match="has neither"):
        load_pretrained(made("llama", seed=2), path)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.LlamaForCausalLM.from_pretrained(path)
