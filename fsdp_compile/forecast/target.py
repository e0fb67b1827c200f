"""Make the model to plan, from a function or a Hugging Face config, on the meta device."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .joint import Mistake, StepArguments

_SIZES = ("batch_size", "sequence")
_MOST_NAMES = 5
_LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Made:
    """A model on the meta device, and its batch."""

    model: nn.Module
    call: StepArguments
    size: tuple[int, int]  # of one rank's batch: sequences and their length, or samples and 1
    has_own_batch: bool = False  # its size is fixed, whatever size was asked for

    @property
    def num_tokens(self) -> int:
        return self.size[0] * self.size[1]


@dataclass(frozen=True)
class Target:
    """A function that makes the model of a plan, by batch size and sequence length, and the user's words for it."""

    said: str
    make: Callable[[int, int], Made]


def find_target(said: str) -> Target:
    """Return the target for ``module:function`` or for the path of a config."""
    path = Path(said)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        return _of_config(path)
    module_name, separator, name = said.partition(":")
    if not separator or not name.isidentifier():
        raise Mistake(
            f"{said!r} is neither a file nor module:function: give the path of a config.json, or e.g. train:build for "
            "the function build of train.py, which returns a model, or a model and its batch."
        )
    return _of_function(said, _function(module_name, name))


def _of_config(path: Path) -> Target:
    config = _read_config(path)

    def make(batch: int, sequence: int) -> Made:
        model = _model_of(config, path, sequence)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        return Made(model, StepArguments((), {"input_ids": tokens, "labels": tokens}), (batch, sequence))

    return Target(str(path), make)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Mistake(f"{path} cannot be read ({error.strerror}): give the path of a model's config.json.") from error
    except ValueError as error:
        raise Mistake(f"{path} is not JSON ({error}): give the config.json of a Hugging Face model.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise Mistake(
            f"{path} has no model_type, so it is not the config of a Hugging Face model: give the config.json that "
            "stands beside its weights."
        )
    return config


def _model_of(config: dict[str, Any], path: Path, sequence: int) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise Mistake(
            f"{path} is a Hugging Face config, and transformers is not installed: pip install 'transformers>=5', or "
            "give module:function."
        ) from error
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        raise _no_model(path, _unknown_type(config["model_type"], transformers))
    settings = {key: value for key, value in config.items() if key not in ("model_type", "transformers_version")}
    try:
        read = transformers.AutoConfig.for_model(config["model_type"], **settings)
    except Exception as error:  # a config may say anything
        raise _no_model(path, error) from error
    longest = getattr(read, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < sequence:
        raise Mistake(
            f"{path} has positions for {longest} tokens, and --batch asks for sequences of {sequence}: give shorter "
            "ones, or a larger max_position_embeddings."
        )
    read.use_cache = False
    named = (read.architectures or [""])[0]
    suffix = next((one for one in _MAKERS if named.endswith(one)), "ForCausalLM")
    try:
        with torch.device("meta"):
            model = getattr(transformers, _MAKERS[suffix]).from_config(read, attn_implementation=_without_a_mask())
    except Exception as error:
        raise _no_model(path, error) from error
    return model.to(torch.float32)  # type: ignore[no-any-return]


_MAKERS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}


def _without_a_mask() -> str:
    """Register an attention for transformers that has no mask (sdpa, told that it is causal), and return its name.

    When traced, theirs makes a mask of all pairs of tokens, which flash attention does without.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    name = "fsdp_compile_plan"  # transformers makes masks only for names that it knows
    AttentionInterface.register(name, sdpa_attention_forward)
    return name


def _unknown_type(said: str, transformers: Any) -> ValueError:
    """Return an error that names a few similar types; that of transformers names hundreds."""
    known = [*transformers.CONFIG_MAPPING]
    near = difflib.get_close_matches(said, known, n=_MOST_NAMES, cutoff=0.5)
    return ValueError(
        f"transformers {transformers.__version__} knows {len(known)} values of model_type, and {said!r} is none of them"
        + (f"; near it are {', '.join(near)}" if near else "")
    )


def _no_model(path: Path, error: Exception) -> Mistake:
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    said = textwrap.shorten(next(lines, ""), _LONGEST_MESSAGE, placeholder=" ...")
    return Mistake(
        f"transformers makes no model of {path} ({type(error).__name__}: {said}): mend the config, or give "
        "module:function."
    )


def _function(module_name: str, name: str) -> Callable[..., Any]:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise Mistake(
            f"there is no module {error.name} to import from {here}: run the command in the folder that it is in, or "
            "install it."
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "no function" if found is None else f"a {type(found).__name__}, not a function,"
        its = [one for one, value in vars(module).items() if inspect.isfunction(value) and not one.startswith("_")]
        known = difflib.get_close_matches(name, its) or sorted(its)[:_MOST_NAMES]
        raise Mistake(f"{module_name} has {what} called {name}: give a function of it, such as {', '.join(known)}.")
    return found  # type: ignore[no-any-return]


def _of_function(said: str, function: Callable[..., Any]) -> Target:
    parameters = inspect.signature(function).parameters
    sizes = [one for one in _SIZES if one in parameters]

    def make(batch: int, sequence: int) -> Made:
        given = {"batch_size": batch, "sequence": sequence}
        try:
            with torch.device("meta"):
                returned = function(**{one: given[one] for one in sizes})
        except Exception as error:
            message = str(error).strip().partition("\n")[0]
            raise Mistake(
                f"{said} raised {type(error).__name__}: {message}; have it make a model on the meta device, called "
                "with no arguments but batch_size and sequence."
            ) from error
        model, its_batch = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(model, nn.Module):
            raise Mistake(
                f"{said} returned a {type(returned).__name__}: have it return a model, or a model and its batch."
            )
        call = _call_of(torch.zeros(batch, sequence, dtype=torch.long) if its_batch is None else its_batch)
        return Made(model, call, _size(call), has_own_batch=its_batch is not None and not sizes)

    return Target(said, make)


def _call_of(batch: Any) -> StepArguments:
    batch = _on_cpu(batch)
    if isinstance(batch, Mapping):
        return StepArguments((), dict(batch))
    return StepArguments(tuple(batch), {}) if isinstance(batch, (tuple, list)) else StepArguments((batch,), {})


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _on_cpu(one) for key, one in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (tuple, list) else value


def _size(call: StepArguments) -> tuple[int, int]:
    """Return the size by the first tensor: whole numbers in two dimensions are tokens."""
    tensors = [one for one in (*call.args, *call.kwargs.values()) if isinstance(one, torch.Tensor) and one.dim()]
    if not tensors:
        return 1, 1
    first = tensors[0]
    is_tokens = first.dim() == 2 and not first.dtype.is_floating_point
    return first.shape[0], first.shape[1] if is_tokens else 1
