"""Inductor's code for a GPU, generated on a machine without one.

    codes = code_of(model, batch)         a sharded model on the CPU, in a fake process group
    codes.forwards, codes.backwards       Python source, with the Triton kernels in it

The model is traced on the CPU, since autograd's engine asks the driver of a GPU for a context. Inductor gets the graphs
with each tensor on a GPU that a stand-in describes, and its code is kept instead of run. Kernels can be compiled
all the same: Triton brings its own assembler.

``compile_fx`` is imported where it is used: on torch 2.11 its import warns, which fails where tests are collected.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch.utils._triton
from torch import Tensor, fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.exc import InductorError
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fsdp_compile.api.classes import refresh
from fsdp_compile.core.unit import Unit, units_in
from fsdp_compile.passes.ir.aliases import base_of
from fsdp_compile.passes.ir.markers import change_spec, spec_in, unshard
from fsdp_compile.passes.ir.provenance import reduce_nodes, unshard_nodes
from fsdp_compile.passes.wire.copies import to_device

GPU = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    clock_rate=1980000,
    memory_clock_rate=2619000,
    gcnArchName="",
    is_integrated=0,
    is_multi_gpu_board=0,
)


@dataclass
class Codes:
    """The code of each graph that was compiled, in the order in which they were."""

    forwards: list[str] = field(default_factory=list)
    backwards: list[str] = field(default_factory=list)

    def backend(
        self, module: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        """Compile like Inductor, for the GPU; what comes out is not run."""
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs, inner_compile=self._inner, config_patches=options)

    def _inner(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.graph import GraphLowering

        on_gpu = _on_gpu(module, inputs)
        kept = self.backwards if options.get("is_backward") else self.forwards
        generate = GraphLowering.codegen

        def keep(lowering: Any) -> Any:
            code, *_ = generate(lowering)
            kept.append(code.value)
            raise _Kept

        with _pretended(), mock.patch.object(GraphLowering, "codegen", keep):
            try:
                compile_fx_inner(module, on_gpu, **options)
            except InductorError as error:
                if not isinstance(error.inner_exception, _Kept):
                    raise
        return _not_run


class _Kept(Exception):
    """This exception stops Inductor once it has generated the code, which cannot run here."""


class NotRun(Exception):
    """Raised where the generated code would run."""


def _not_run(*inputs: Any) -> Any:
    raise NotRun


def _on_gpu(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Have the graph compute on the GPU, and return its inputs there: fake tensors, as all of the graph's values.

    Our markers name the device of an offloaded shard by a string; such a shard stays on the CPU, as does an activation
    that is copied from there.
    """
    on_cpu = set()
    for node in module.graph.nodes:
        device = node.kwargs.get("device")
        if node.op == "call_function" and device:
            node.kwargs = {**node.kwargs, "device": str(GPU) if isinstance(device, str) else GPU}
            if isinstance(device, str) and node.target is to_device:
                on_cpu.add(base_of(node.args[0]))
    for node in (*unshard_nodes(module.graph), *reduce_nodes(module.graph)):
        if spec_in(node).device:
            change_spec(node, device=str(GPU))
            if node.target is unshard:
                on_cpu.add(base_of(node.args[0]))
    module.recompile()
    stays = [node in on_cpu for node in module.graph.find_nodes(op="placeholder")]
    fake_mode = next(one.fake_mode for one in inputs if isinstance(one, FakeTensor))

    def moved(one: Any, stays: bool) -> Any:
        if stays or not isinstance(one, FakeTensor):
            return one
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=GPU)

    with fake_mode:
        on_gpu = [moved(*each) for each in zip(inputs, stays, strict=True)]
    FakeTensorProp(module, fake_mode).propagate_dont_convert_inputs(*on_gpu)
    return on_gpu


@contextlib.contextmanager
def _pretended() -> Iterator[None]:
    """Have torch and Triton see one H100. Seen with torch 2.15 and Triton 3.9."""
    import triton.runtime.driver
    from triton.backends.compiler import GPUTarget

    torch._C._ensureCUDADeviceGuardSet()
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda.get_device_properties": H100,
        "torch.cuda._get_device_properties": H100,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda._lazy_init": None,
        "torch.cuda.is_initialized": True,
        "torch.cuda.get_device_name": H100.name,
        "torch.cuda.set_device": None,
        "torch.cuda.synchronize": None,
        "torch.cuda.is_bf16_supported": True,
        "torch.cuda.get_rng_state": state,
        "torch.cuda.set_rng_state": None,
        "torch.cuda._exchange_device": 0,
        "torch.cuda._maybe_exchange_device": 0,
        "torch.cuda.is_current_stream_capturing": False,
        "torch._C._cuda_getDevice": 0,
        "torch._C._cuda_getCurrentRawStream": 0,
    }
    utils = SimpleNamespace(
        get_device_properties=lambda index: {
            "max_shared_mem": H100.shared_memory_per_block_optin,
            "multiprocessor_count": H100.multi_processor_count,
            "warpSize": H100.warp_size,
            "max_num_regs": H100.regs_per_multiprocessor,
        }
    )
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: GPU,
        get_current_stream=lambda device=0: 0,
        is_active=lambda: True,
        get_device_interface=lambda: torch.cuda,
        utils=utils,
    )
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, create=True, new=lambda *args, answer=answer, **named: answer))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        # The modules of kernels call it; it looks for the libraries of a real driver.
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        _ask_again_for_triton()
        stack.callback(_ask_again_for_triton)
        yield


def _ask_again_for_triton() -> None:
    """Have torch forget whether Triton can be used, which it looks up once."""
    for one in vars(torch.utils._triton).values():
        if hasattr(one, "cache_clear"):
            one.cache_clear()


def code_of(model: Any, *batch: Tensor, **options: Any) -> Codes:
    """Return the code of a model's forward and backward, which Inductor generates at once."""
    torch._dynamo.reset()
    codes = Codes()
    at_once = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    # While it is traced, the model computes on the CPU, where offloaded shards are, so none would be copied.
    elsewhere = mock.patch.object(Unit, "computes_elsewhere", property(lambda unit: unit.offload))
    with at_once, elsewhere, contextlib.suppress(NotRun):
        for unit in units_in(model):
            refresh(unit)
        torch.compile(model, backend=codes.backend, **options)(*batch)
    return codes


def assembled(code: str, capability: int) -> list[str]:
    """Compile all Triton kernels of the code, down to machine code for GPUs of this capability; return their names.

    ``CachingAutotuner._precompile_config``: seen with torch 2.15.
    """
    pattern = r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)"
    found = re.findall(pattern, code, re.DOTALL)
    with _pretended():
        for name, source in found:
            kernel = getattr(PyCodeCache.load(source), name)
            for config in kernel.configs:
                kernel._precompile_config(config, cc_override=capability)
    return [name for name, _ in found]
