"""Inductor and AOTAutograd: their passes, caches and settings."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.custom_graph_pass as custom_graph_pass
from torch import nn

from ..passes import _torch_compat as passes_compat
from ..passes._torch_compat import CustomGraphPass as CustomGraphPass


def freezes_parameters() -> bool:
    """Whether Dynamo and Inductor make constants of parameters (``_inductor.config.freezing``: 2.11 to 2.15)."""
    return bool(inductor_config.freezing) and not torch.is_grad_enabled()


def get_post_grad_pass() -> Any:
    """Return what Inductor calls before its post-grad passes (2.11: one pass; 2.15: one, or a list)."""
    return inductor_config.post_grad_custom_pre_pass


def set_post_grad_pass(value: Any) -> None:
    _set_in_all_threads(inductor_config, "post_grad_custom_pre_pass", value)


# The class of passes that are told whether the graph is for inference: 2.15. A composed pass must be one to be told.
InferenceAwareGraphPass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


def call_graph_pass(one_pass: Any, graph: torch.fx.Graph, is_inference: bool) -> None:
    """Call a user's pass as Inductor would."""
    if InferenceAwareGraphPass is not CustomGraphPass and isinstance(one_pass, InferenceAwareGraphPass):
        one_pass(graph, is_inference)
    else:
        one_pass(graph)


def get_joint_pass() -> Any:
    """Return what AOTAutograd calls on a joint graph, ``(module, inputs) -> module`` (2.11 to 2.15).

    It is not in any cache key; the hash of our source is, through the post-grad pass.
    """
    return functorch_config.joint_custom_pass


def set_whole_pass(one_pass: Callable[[torch.fx.GraphModule], torch.fx.GraphModule]) -> None:
    """Have AOTAutograd call ``one_pass`` on each graph that it does not cut, after its own pass for these.

    Its own pass recomputes what activation checkpointing says, if backward was traced into the graph of its forward. No
    backend is called there, and no setting takes a pass, so we replace ``remat_using_tags_for_fwd_loss_bwd_graph`` in
    ``_functorch._activation_checkpointing``, which is looked up at each call: 2.11 to 2.15. In 2.11 no node says that
    it belongs to a backward, so nothing happens there.
    """
    from torch._functorch._activation_checkpointing import remat_using_tags_for_fwd_loss_bwd_graph_pass as theirs

    compute_again: Any = theirs.remat_using_tags_for_fwd_loss_bwd_graph
    if hasattr(compute_again, "fsdp_compile"):
        return

    @functools.wraps(compute_again)
    def then_ours(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        return one_pass(compute_again(module))

    then_ours.fsdp_compile = True  # type: ignore[attr-defined]
    theirs.remat_using_tags_for_fwd_loss_bwd_graph = then_ours  # type: ignore[assignment]


def set_joint_pass(value: Any) -> None:
    _set_in_all_threads(functorch_config, "joint_custom_pass", value)


def _set_in_all_threads(config: Any, name: str, value: Any) -> None:
    """Change a setting on this thread, and its default, which other threads see.

    In 2.15 a setting is a ContextVar: what one thread sets, another does not see. Backward is compiled on the thread
    where autograd runs it first (on CUDA, autograd's own), where the default counts. ``_config``: 2.11 to 2.15.
    """
    setattr(config, name, value)
    entry = config._config[name]
    if hasattr(entry.user_override, "get"):
        entry.default = value


class _SwitchesOff:
    """Turns off switches in torch's settings modules; uses may overlap, on one thread or several, in any order.

    It does so as if the environment forced them off. That goes before what a thread sets, which others may not see, and
    before what the environment says (TORCHINDUCTOR_FX_GRAPH_CACHE=1). ``_config``, ``env_value_force``: 2.11 to 2.15.
    """

    def __init__(self, *switches: tuple[Any, str]) -> None:
        self._entries = [config._config[name] for config, name in switches]
        self._lock = threading.Lock()
        self._num_uses = 0
        self._forced: list[Any] = []

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """A block in which the switches are off, on every thread."""
        with self._lock:
            if not self._num_uses:
                self._forced = [entry.env_value_force for entry in self._entries]
                for entry in self._entries:
                    entry.env_value_force = False
            self._num_uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_uses -= 1
                if not self._num_uses:
                    for entry, forced in zip(self._entries, self._forced, strict=True):
                        entry.env_value_force = forced


# A block that compiles graphs even where a cache holds them; compiled kernels are still found in theirs.
no_compile_caches = _SwitchesOff(
    (inductor_config, "fx_graph_cache"),
    (inductor_config, "fx_graph_remote_cache"),
    (functorch_config, "enable_autograd_cache"),
    (functorch_config, "enable_remote_autograd_cache"),
).off


def size_when_compiled(size: int | torch.SymInt) -> int:
    """Return a size as a number: for a symbolic one the value seen when it was compiled, 2 if there was none."""
    return passes_compat.size_hint(size, default=2)


def missing_compiler(device_type: str) -> str | None:
    """Return what Inductor would miss when it makes kernels for this device, in words; None if it has all.

    For the CPU it looks for ``torch._inductor.config.cpp.cxx`` (CXX, or g++) and runs it, with Python's headers:
    cpp_builder.get_cpp_compiler and exc.InvalidCxxCompiler, 2.11 to 2.15. For CUDA, Triton wants CC, gcc or clang.
    """
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            tried = ", ".join(str(one) for one in inductor_config.cpp.cxx if one is not None)
            return f"a C++ compiler, and {tried} does not run (CXX=... names another one)"
    else:
        named = os.environ.get("CC")
        if not any(map(shutil.which, ("gcc", "clang") if named is None else shlex.split(named)[:1])):
            return f"a C compiler, and {named or 'gcc'} was not found (CC=... names another one)"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return None if headers.exists() else f"Python's headers, and there is no {headers}"


class _JointGraphIsThere(Exception):
    """This exception stops AOTAutograd before it partitions, compiles or runs the graph."""


def trace_joint_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], decomposed: bool = True) -> None:
    """Trace a call of ``model`` as Inductor has it traced, and stop when the passes on its joint graph have run.

    If it is not ``decomposed``, its operators are those that run without a compiler.

    ``torch._dynamo.backends.common.aot_autograd``, ``torch._inductor.decomposition.select_decomp_table``,
    ``torch._dynamo.reset``: 2.11 to 2.15.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def stop(*inputs: Any, **settings: Any) -> Any:
        raise _JointGraphIsThere

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        table = select_decomp_table() if decomposed else {}
        traced: Any = aot_autograd(fw_compiler=stop, bw_compiler=stop, partition_fn=stop, decompositions=table)
        try:
            traced(module, inputs)
        except _JointGraphIsThere:
            return stop
        raise RuntimeError("no gradient is asked for in this call, so there is no backward to plan")

    torch._dynamo.reset()  # else it remembers models of other sizes, and after a few of them gives up on this one
    try:
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except _JointGraphIsThere:
        pass
    finally:
        torch._dynamo.reset()
