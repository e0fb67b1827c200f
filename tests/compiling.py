"""Compiling in tests: the backends, and one function that compiles a model on one of them.

"eager"      not compiled: fsdp_compile's hooks
"aot_eager"  joint graphs with our markers, run as they are: one collective a parameter
"passes"     the same, then our passes on the forward and the backward graph, as under Inductor; no code is generated
"decomposed" the same, with Inductor's decompositions of ops
"as needed"  "passes" while something looks at what passes do, else torch's "eager": a graph, and neither AOTAutograd nor
             passes. For the code of docs, whose ways of training have their rows in tests/matrix
"inductor"   what users have by default, and seconds of g++ a graph: a row of tests/matrix for each way of training
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend
from torch._inductor.async_compile import AsyncCompile

from fsdp_compile.graph.install import manager

PATHS = ("eager", "aot_eager")


def compiled(model: nn.Module, path: str | None, fullgraph: bool = True) -> Any:
    """The model compiled on the backend of that name; the model itself on the path "eager", or None."""
    return model if path in ("eager", None) else torch.compile(model, backend=path, fullgraph=fullgraph)


def compile_blocks(model: Any, backend: str = "aot_eager", fullgraph: bool = True) -> Any:
    """The model, whose layers are compiled one by one."""
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=fullgraph)
    return model


def num_graphs() -> int:
    """How many Dynamo has compiled since the test began."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _run_passes(module: fx.GraphModule, inputs: Any) -> Any:
    manager(module.graph)
    module.recompile()
    return make_boxed_func(module.forward)


@register_backend(name="passes")
def passes(module: fx.GraphModule, inputs: Any) -> Any:
    """AOTAutograd with the partitioner and our passes."""
    return _aot_with_passes()(module, inputs)


@register_backend(name="decomposed")
def decomposed(module: fx.GraphModule, inputs: Any) -> Any:
    """What the joint graph is under Inductor, without what Inductor makes of it."""
    from torch._inductor.decomposition import select_decomp_table

    return _aot_with_passes(decompositions=select_decomp_table())(module, inputs)


@register_backend(name="as needed")
def as_needed(module: fx.GraphModule, inputs: Any) -> Any:
    return passes(module, inputs) if manager.observers else module.forward


def _aot_with_passes(**settings: Any) -> Any:
    return aot_autograd(
        fw_compiler=_run_passes,
        bw_compiler=_run_passes,
        partition_fn=min_cut_rematerialization_partition,
        **settings,
    )


@contextlib.contextmanager
def no_kernels_built() -> Iterator[None]:
    """Inductor makes its graphs and its code, and calls in it that compute nothing: g++ is most of what it costs.

    For tests of graphs, plans and code. Results, and saved tensors, are whatever memory held.
    """

    def left_out(self: AsyncCompile, argtypes: list[str], source_code: str) -> Callable[..., Any]:
        return lambda *args: None

    with mock.patch.object(AsyncCompile, "cpp_pybinding", left_out):
        yield
