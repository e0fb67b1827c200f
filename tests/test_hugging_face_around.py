"""Folders of Hugging Face where something is around: wrappers, adapters, other files, errors of one rank, kills."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
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
from benchmarks.loading import larger_than_memory
from fsdp_compile import fully_shard, load_pretrained, save_pretrained
from fsdp_compile.fsdp1 import FullyShardedDataParallel
from fsdp_compile.fsdp1.wrap import ModuleWrapPolicy
from fsdp_compile.hugging_face import save as saving
from fsdp_compile.hugging_face.safetensors import File, Writer
from fsdp_compile.workers import WorkerError
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks
from tests.test_hugging_face import assert_same_values, inputs, made, on_meta, saved, sharded, train

pytestmark = pytest.mark.more  # a part of test_hugging_face.py runs by default


def read(folder: Path | str, cls: Any = transformers.LlamaForCausalLM) -> Any:
    """As transformers reads it, which says nothing of what it misses."""
    model, said = cls.from_pretrained(folder, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    return model.eval()


def given(folder: Path) -> Any:
    """A model that is not sharded, and its folder."""
    return saved(made("llama"), folder / "theirs")


def _checkpointed(model: Any) -> Any:
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = fully_shard(checkpoint_wrapper(layer))
    return fully_shard(model)


def _compiled_blocks(model: Any) -> Any:
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = torch.compile(fully_shard(layer), backend="eager")
    return fully_shard(model)


def _fsdp1(model: Any) -> Any:
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def _compiled(model: Any) -> Any:
    return torch.compile(sharded(model, "llama"), backend="eager")


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "checkpointed": _checkpointed,
    "compiled blocks": _compiled_blocks,
    "FSDP1": _fsdp1,
    "compiled": _compiled,
}


@pytest.mark.parametrize("kind", WRAPPED)
@on_two_ranks
def test_what_wraps_modules_has_no_name_in_a_folder(tmp_path: Path, kind: str) -> None:
    theirs = given(tmp_path)
    model = WRAPPED[kind](made("llama", seed=1) if kind == "FSDP1" else on_meta("llama"))
    assert load_pretrained(model, f"{tmp_path}/theirs") is model
    batch = inputs(0)
    torch.testing.assert_close(model(**batch).logits, theirs(**batch).logits, atol=1e-5, rtol=1e-5)
    save_pretrained(model, f"{tmp_path}/ours")
    assert_same_values(read(f"{tmp_path}/ours"), theirs)


@on_two_ranks
def test_full_parameters_in_the_shards_places_are_refused(tmp_path: Path) -> None:
    given(tmp_path)
    model = sharded(made("llama", seed=1), "llama")
    for function in (load_pretrained, save_pretrained):
        words = r"cannot (load|save) weights while .* is a full parameter\. Do it outside of full_params"
        with fsdp_compile.full_params(model), pytest.raises(RuntimeError, match=words):
            function(model, f"{tmp_path}/theirs")


@on_two_ranks
def test_what_transformers_writes_as_one_is_gathered_together(tmp_path: Path) -> None:
    """Its files have one weight of three of the model's."""
    sizes = {"hidden_size": 24, "intermediate_size": 42, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.NomicBertConfig(vocab_size=37, max_position_embeddings=32, **sizes)
    theirs = saved(transformers.NomicBertModel(config), tmp_path / "theirs")
    with torch.device("meta"):
        model: Any = transformers.NomicBertModel(config)
    fsdp_compile.auto_shard(model, 2000)
    load_pretrained(model, f"{tmp_path}/theirs")
    assert_same_values(model, theirs)
    save_pretrained(model, f"{tmp_path}/ours", max_shard_size="8KB")
    assert_same_values(read(f"{tmp_path}/ours", transformers.NomicBertModel), theirs)
    [single] = (tmp_path / "theirs").glob("*.safetensors")
    ours = {name for path in (tmp_path / "ours").glob("*.safetensors") for name in File(path).entries}
    assert ours == set(File(single).entries) and any("Wqkv" in name for name in ours)


@on_two_ranks
def test_transformers_own_functions_go_with_sharded_models(tmp_path: Path) -> None:
    theirs = given(tmp_path)
    with fsdp_compile.adopt():
        model = sharded(transformers.LlamaForCausalLM.from_pretrained(f"{tmp_path}/theirs").eval(), "llama")
    run = torch.compile(model, backend="eager")
    ours = train(run, model, [dist.get_rank()])
    train(theirs, theirs, [0, 1])
    assert ours[1] < ours[0]
    assert_same_values(model, theirs, atol=1e-5)
    whole = get_model_state_dict(run, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(f"{tmp_path}/whole", state_dict=whole)
    dist.barrier()
    assert_same_values(model, read(f"{tmp_path}/whole"))
    save_pretrained(run, f"{tmp_path}/ours")
    assert_same_values(read(f"{tmp_path}/ours"), read(f"{tmp_path}/whole"))
    again = load_pretrained(sharded(on_meta("llama"), "llama"), f"{tmp_path}/whole")
    assert_same_values(again, read(f"{tmp_path}/whole"))


@on_two_ranks
def test_a_folder_is_written_over_and_what_is_not_of_it_stays(tmp_path: Path) -> None:
    theirs = given(tmp_path)
    path = tmp_path / "theirs"
    model = load_pretrained(sharded(on_meta("llama"), "llama"), path)
    if dist.get_rank() == 0:
        (path / "model_ema.safetensors").write_bytes(b"mine")
    dist.barrier()
    save_pretrained(model, path, max_shard_size="20KB", dtype=torch.bfloat16)  # which had one file
    assert not (path / "model.safetensors").exists() and (path / "model_ema.safetensors").read_bytes() == b"mine"
    again = read(path)
    assert again.dtype == torch.bfloat16  # config.json says so
    assert_same_values(again, made("llama").bfloat16())
    assert model.config.dtype != again.config.dtype, "only what is written"
    dist.barrier()
    save_pretrained(model, path)
    assert sorted(one.name for one in path.glob("*model*")) == ["model.safetensors", "model_ema.safetensors"]
    assert_same_values(read(path), theirs)


_SMALL = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 42}
_NEOX = {**_SMALL, "vocab_size": 37, "max_position_embeddings": 32}
_VIT = {**_SMALL, "image_size": 16, "patch_size": 8}


@on_two_ranks
def test_names_that_transformers_maps_by_class_are_those_of_the_class_that_was_sharded(tmp_path: Path) -> None:
    saved(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_NEOX)), tmp_path / "neox")
    saved(transformers.ViTForImageClassification(transformers.ViTConfig(**_VIT)), tmp_path / "vit")
    with torch.device("meta"):
        neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_NEOX))
        vit = transformers.ViTModel(transformers.ViTConfig(**_VIT), add_pooling_layer=False)
    load_pretrained(fsdp_compile.auto_shard(neox), f"{tmp_path}/neox")
    expected = read(f"{tmp_path}/neox", transformers.GPTNeoXForCausalLM)
    assert_same_values(neox, expected)
    load_pretrained(fsdp_compile.auto_shard(vit), f"{tmp_path}/vit", strict=False)  # it has a classifier besides
    assert_same_values(vit, transformers.ViTModel.from_pretrained(f"{tmp_path}/vit", add_pooling_layer=False))
    save_pretrained(neox, f"{tmp_path}/ours")
    assert File(tmp_path / "ours/model.safetensors").entries.keys() == File(tmp_path / "neox/model.safetensors").entries.keys()
    assert_same_values(read(f"{tmp_path}/ours", transformers.GPTNeoXForCausalLM), expected)


@on_two_ranks
def test_how_a_folders_model_generates_is_read_and_not_written_over(tmp_path: Path) -> None:
    given(tmp_path)
    path = tmp_path / "theirs"
    saved(transformers.GenerationConfig(do_sample=True, temperature=0.3, eos_token_id=[5, 7]), path)
    model = load_pretrained(sharded(on_meta("llama"), "llama"), path)
    expected = read(path).generation_config
    assert expected.temperature == 0.3 and model.generation_config == expected
    save_pretrained(model, path)
    again = read(path).generation_config
    assert (again.do_sample, again.temperature, again.eos_token_id) == (True, 0.3, [5, 7])


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


@on_two_ranks
def test_what_one_rank_raises_all_raise_and_the_folder_is_as_before(tmp_path: Path) -> None:
    theirs = given(tmp_path)
    rank = dist.get_rank()
    model = sharded(made("llama", seed=1), "llama")
    path = f"{tmp_path}/theirs" if rank == 0 else f"{tmp_path}/elsewhere"
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
        save_pretrained(model, f"{tmp_path}/theirs", max_shard_size="20KB")
    assert_same_values(read(f"{tmp_path}/theirs"), theirs)
    with pytest.raises(ValueError, match=r"ranks . and . have different models, of which one folder"):
        save_pretrained(model.model if rank else model, f"{tmp_path}/theirs")
    assert_same_values(read(f"{tmp_path}/theirs"), theirs)
    assert time.monotonic() - began < 30, "no rank waited for the other"
    save_pretrained(model, f"{tmp_path}/theirs")
    assert_same_values(model, read(f"{tmp_path}/theirs"))


def _killed_while_saving(tmp_path: Path, when: str) -> None:
    given(tmp_path)
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
        save_pretrained(model, f"{tmp_path}/theirs", max_shard_size="20KB")


@pytest.mark.parametrize("when", ["everything is written", "one file is in its place"])
def test_a_kill_while_saving_leaves_what_was_there_or_nothing_that_loads(
    two_ranks: Ranks, tmp_path: Path, when: str
) -> None:
    with pytest.raises(WorkerError, match="rank 0 ended with SIGKILL"):
        two_ranks.run(_killed_while_saving, tmp_path, when)
    path = tmp_path / "theirs"
    assert list(path.glob("*.partial"))
    if when == "everything is written":
        assert_same_values(read(path), made("llama"))
        assert_same_values(load_pretrained(made("llama", seed=2), path), made("llama"))
        return
    assert list(path.glob("model-00001-*.safetensors"))
    with pytest.raises(FileNotFoundError, match="has neither"):
        load_pretrained(made("llama", seed=2), path)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.LlamaForCausalLM.from_pretrained(path)


def test_one_of_many_ranks_holds_and_maps_its_rows_alone() -> None:
    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, use_cache=False)
    small = {**sizes, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64}
    larger_than_memory(transformers.LlamaConfig(**small, num_hidden_layers=1), num_ranks=2)  # imports what it needs
    part = larger_than_memory(config, num_ranks=64)
    assert part.is_right
    assert part.folder_bytes > 64 * 0.99 * part.shard_bytes
    slack = 5 << 20  # less than a quarter of a matrix of an MLP
    assert 0.99 * part.shard_bytes < part.anonymous_bytes < part.shard_bytes + slack
    assert part.mapped_bytes < part.shard_bytes + slack
