"""What hardware can do, as data: the figures that costs are computed from.

    profile "h100"        flops a second by dtype, dense          x  matmul_efficiency
                          memory bytes a second                   x  memory_efficiency
                          inside    link between ranks of a node  x  its efficiency
                          between   link between nodes            x  its efficiency

Peaks are those of the vendor's data sheets; the share that programs reach is a field of its own, so that neither hides
in the other. The profiles below are constants, equal on every rank. ``fsdp-compile calibrate`` writes one of a machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class Fit:
    """One kind of collective as measured: it takes ``latency_s`` plus bytes on the wire / ``bytes_per_s``."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _require(self, "latency_s", at_least=0.0)
        _require(self, "bytes_per_s", above=0.0)


@dataclass(frozen=True)
class Link:
    """How ranks reach one another."""

    latency_s: float  # of a collective, however small it is and however few ranks take part
    step_s: float  # more for each step from rank to rank
    bytes_per_s: float  # out of one rank, in one direction
    efficiency: float  # share of ``bytes_per_s`` that large collectives reach
    slows_compute: float = 0.0  # share of its speed that computation loses while a collective is in flight
    # Kinds of collectives that were measured, on this many ranks; the figures above hold for the other kinds.
    measured: Mapping[str, Fit] = field(default_factory=dict, hash=False)
    measured_ranks: int = 0
    measured_per_node: int = 1  # for a link between nodes, how many of these ranks shared a node

    def __post_init__(self) -> None:
        _require(self, "latency_s", at_least=0.0)
        _require(self, "step_s", at_least=0.0)
        _require(self, "bytes_per_s", above=0.0)
        _require(self, "efficiency", above=0.0, at_most=1.0)
        _require(self, "slows_compute", at_least=0.0, below=1.0)
        _require_whole(self, "measured_ranks", at_least=2 if self.measured else 0)
        _require_whole(self, "measured_per_node", at_least=1)
        for kind in self.measured:
            if kind not in KINDS:
                raise ValueError(f"Link.measured has {kind!r}, which is none of {', '.join(KINDS)}. Rename or drop it.")
        object.__setattr__(self, "measured", dict(sorted(self.measured.items())))


@dataclass(frozen=True)
class HardwareProfile:
    """One kind of rank: a GPU or a CPU process, its memory, and its links to others."""

    name: str
    backend: str  # of the process groups; gloo moves the bytes of an all_reduce in its reduce_scatter
    flops: Mapping[str, float] = field(hash=False)  # a second, by dtype: dense matmuls; "tf32" where float32 may use it
    matmul_efficiency: float  # share of the peak that large matmuls of a model reach
    memory_bytes: int  # that torch may allocate on one rank
    memory_bytes_per_s: float  # read plus written
    host_bytes_per_s: float  # copies from or to the memory of the CPU that drives it, in one direction
    memory_efficiency: float  # share of both bandwidths that is reached
    kernel_s: float  # what each kernel takes at least
    ranks_per_node: int
    inside: Link  # between ranks of one node
    between: Link  # between nodes
    attention_efficiency: float = 1.0  # attention kernels' share of what matmuls reach

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"HardwareProfile.name is {self.name!r}. Give it a name, such as 'h100'.")
        if self.backend not in BACKENDS:
            raise ValueError(f"HardwareProfile.backend is {self.backend!r}, not one of {', '.join(BACKENDS)}.")
        if not isinstance(self.flops, Mapping) or "float32" not in self.flops:
            raise ValueError(
                "HardwareProfile.flops has no 'float32', which stands in for dtypes without a figure. Give flops a "
                "second by dtype, such as {'float32': 67e12, 'bfloat16': 989e12}."
            )
        for dtype, value in self.flops.items():
            _check(f"HardwareProfile.flops[{dtype!r}]", value, above=0.0)
        for name in ("matmul_efficiency", "memory_efficiency", "attention_efficiency"):
            _require(self, name, above=0.0, at_most=1.0)
        _require_whole(self, "memory_bytes", at_least=1)
        _require_whole(self, "ranks_per_node", at_least=1)
        _require(self, "memory_bytes_per_s", above=0.0)
        _require(self, "host_bytes_per_s", above=0.0)
        _require(self, "kernel_s", at_least=0.0)
        for name in ("inside", "between"):
            if not isinstance(getattr(self, name), Link):
                raise TypeError(f"HardwareProfile.{name} is a {type(getattr(self, name)).__name__}, not a Link.")
        object.__setattr__(self, "flops", dict(sorted(self.flops.items())))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Read what ``to_json`` wrote; raise ValueError or TypeError that says what is wrong with it."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"This is not JSON ({error}). `fsdp-compile calibrate --out` writes a profile.") from error
        fields = _fields_of(cls, fields)
        for name in ("inside", "between"):
            link = _fields_of(Link, fields[name], name)
            measured = link.get("measured", {})
            if not isinstance(measured, dict):
                raise TypeError(f"HardwareProfile.{name}.measured is {measured!r}, not an object.")
            link["measured"] = {
                kind: Fit(**_fields_of(Fit, fit, f"{name}.measured.{kind}")) for kind, fit in measured.items()
            }
            fields[name] = Link(**link)
        return cls(**fields)


def load_profile(name: str | Path) -> HardwareProfile:
    """Return a built-in profile by its name, or the one in a JSON file."""
    if str(name) in PROFILES:
        return PROFILES[str(name)]
    path = Path(name)
    if not path.is_file():
        if str(name).lower() in PROFILES:
            return PROFILES[str(name).lower()]
        known = ", ".join(PROFILES)
        raise ValueError(f"There is no hardware profile {str(name)!r}: give one of {known}, or the path of a file.")
    try:
        return HardwareProfile.from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error}). `fsdp-compile calibrate --out` writes a profile.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error


def _fields_of(cls: type[Any], given: Any, where: str = "") -> dict[str, Any]:
    """Return a dataclass's fields from JSON; raise unless these are all that it needs, and no others."""
    what = f"HardwareProfile.{where}" if where else "HardwareProfile"
    if not isinstance(given, dict):
        raise TypeError(f"{what} is {given!r}, not an object of fields.")
    known = {one.name: one for one in dataclasses.fields(cls)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{what} has no field {unknown[0]!r}. Its fields are {', '.join(known)}.")
    for name, one in known.items():
        optional = one.default is not dataclasses.MISSING or one.default_factory is not dataclasses.MISSING
        if name not in given and not optional:
            raise ValueError(f"{what} lacks {name!r}. Add it; its fields are {', '.join(known)}.")
    return dict(given)


def _require(owner: object, name: str, **bounds: float) -> None:
    _check(f"{type(owner).__name__}.{name}", getattr(owner, name), **bounds)


def _require_whole(owner: object, name: str, at_least: int) -> None:
    value, where = getattr(owner, name), f"{type(owner).__name__}.{name}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where} is {value!r}. Give a whole number, at least {at_least}.")
    _check(where, value, at_least=at_least)


def _check(
    where: str,
    value: Any,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    wanted = " and ".join(
        f"{word} {bound:g}"
        for word, bound in (("at least", at_least), ("above", above), ("at most", at_most), ("below", below))
        if bound is not None
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{where} is {value!r}. Give a number {wanted}.")
    fits = (
        math.isfinite(value)
        and (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    )
    if not fits:
        raise ValueError(f"{where} is {value!r}. Give a number {wanted}.")


# What programs reach comes from measurements of parts: of one product, one kernel, one collective. No figure was fitted
# to a training run. Beside each: the title, the address, and what it says.

# Latencies of NVIDIA's eight-GPU nodes, before a byte has moved: estimates, as data sheets do not give them. A
# collective inside a node takes about 20 us however small (passes/wire/layout.py), one between nodes about twice that.
_NVLINK_S, _NVLINK_STEP_S = 15e-6, 2e-6
_INFINIBAND_S, _INFINIBAND_STEP_S = 25e-6, 5e-6
# NCCL's kernels hold multiprocessors while they run. "Characterizing Compute-Communication Overlap in GPU-Accelerated
# Distributed Deep Learning" (arXiv 2507.03114; A100, H100 and others): compute takes 18.9 % longer on average beside
# NVLink collectives. Between A100 nodes alone: 2 % in calculon (systems/a100_80g.json). Hopper's matmuls launch a block
# for each multiprocessor, and take two turns where some are held, by whichever link: 47 % of the peak beside an
# all-gather instead of 80 (forums.developer.nvidia.com/t/337991), twice as long beside FSDP's collectives
# (pytorch/pytorch, issue 143988). So they lose 41 %, and other kernels, some 30 % of a step, 16. Blackwell is taken to
# be alike.
_AMPERE_SLOWS, _AMPERE_BETWEEN_SLOWS, _HOPPER_SLOWS = 1 - 1 / 1.189, 0.02, 0.34
# All-gathers of 16 GB between 8 H100: 360 of 450 GB/s, "exactly what we'd expect" (NVIDIA/nccl-tests, issue 326). 8
# A100 reach 230 to 250 of 300; Blackwell is taken to be alike.
_NVLINK_EFFICIENCY = 0.8
# An adapter of 400 Gb/s, 50 GB/s: 46 to 48 GB/s (NVIDIA/nccl-tests, issue 290).
_INFINIBAND_EFFICIENCY = 0.92
# Inductor's pointwise kernels on large tensors: 2.2 of 2.4 TB/s, on an H100 of Meta (pytorch/ao,
# torchao/testing/training/roofline_utils.py). Newer cards are taken to be alike.
_HBM_EFFICIENCY = 0.92
# Memory is what torch reports of these cards (total_memory), in whole GiB. Data sheets round, and some count GB: an 80
# GB card has 79.1 GiB, an H200 139.8, a B200 178.4. Of that, torch cannot have what the driver takes for a process, 534
# MiB of an H100 (meta-pytorch/torchcomms, pull request 777), and a communicator of NCCL, 688 MB of an A100 in groups of
# more than two (NVIDIA/nccl, issue 964; 1.06 GB for both on 8 H100, issue 1685). Other cards are taken to be alike.
_OUTSIDE_BYTES = (534 << 20) + 688 * 10**6

# A Triton kernel of one element takes 2 us of an H100 (the same file of pytorch/ao).
_GPU_KERNEL_S = 2e-6


def _memory(gib: int) -> int:
    return (gib << 30) - _OUTSIDE_BYTES


def _infiniband(gbit_per_s: float, slows_compute: float) -> Link:
    """Return the link of one adapter per GPU, as in NVIDIA's DGX systems."""
    return Link(
        latency_s=_INFINIBAND_S,
        step_s=_INFINIBAND_STEP_S,
        bytes_per_s=gbit_per_s * 1e9 / 8,
        efficiency=_INFINIBAND_EFFICIENCY,
        slows_compute=slows_compute,
    )


def _nvlink(both_directions: float, slows_compute: float) -> Link:
    """Return a link from NVIDIA's figure, the sum of both directions; a collective has one of them."""
    return Link(
        latency_s=_NVLINK_S,
        step_s=_NVLINK_STEP_S,
        bytes_per_s=both_directions / 2,
        efficiency=_NVLINK_EFFICIENCY,
        slows_compute=slows_compute,
    )


# NVIDIA A100 Tensor Core GPU data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4), A100 80GB SXM, dense figures:
# FP64 tensor core 19.5, FP32 19.5, TF32 156, BF16 and FP16 312 TFLOPS; 80 GB, 2,039 GB/s; NVLink 600 GB/s, PCIe Gen4
# 64 GB/s, of both directions. DGX A100 data sheet: eight 200 Gb/s adapters for eight GPUs. Matmuls of normally
# distributed data, 4,096 to 32,768 rows: 241 to 258 of 312 where the weight has 4,096 to 65,536 on both sides, 250 on
# average (aiconfigurator-core 0.12.0, a100_sxm/gemm/sglang/0.5.10). Attention: 50 to 73 % of the peak
# (FlashAttention-2, arXiv 2307.08691); 62 of the 80 % that matmuls reach. Memory: rotary positions in place, 1.60 to
# 1.64 of 2.04 TB/s on 8,192 to 16,384 tokens (linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv).
_A100 = HardwareProfile(
    name="a100",
    backend="nccl",
    flops={"float64": 19.5e12, "float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12},
    matmul_efficiency=0.80,
    memory_bytes=_memory(79),
    memory_bytes_per_s=2.039e12,
    host_bytes_per_s=32e9,
    memory_efficiency=0.80,
    kernel_s=_GPU_KERNEL_S,
    ranks_per_node=8,
    inside=_nvlink(600e9, _AMPERE_SLOWS),
    between=_infiniband(200, _AMPERE_BETWEEN_SLOWS),
    attention_efficiency=0.775,
)

# NVIDIA H100 Tensor Core GPU data sheet, H100 SXM: FP64 tensor core 67, FP32 67; with sparsity, which is twice the
# dense figure: TF32 989, BF16 and FP16 1,979, FP8 3,958 TFLOPS; 80 GB, 3.35 TB/s; NVLink 900 GB/s, PCIe Gen5 128
# GB/s. DGX H100 user guide: eight ConnectX-7 of 400 Gb/s for eight GPUs. Matmuls: 8 H200, whose chip is the same, at
# their power limit and all at once reach 699 of 989 for the best shape, within 4.5 % of one another; a step waits for
# the slowest, 683 (stas00/ml-engineering, compute/accelerator/benchmarks/README.md, "alone vs all-8 concurrent").
# Attention: cuDNN's kernel, which torch prefers from cuDNN 9.15 on (sdp_utils.cpp): 529 forward and 518 backward for
# heads of 128 and 8,192 tokens, together 521 (FlashAttention-3, arXiv 2407.08608, figures 5 and 6), 53 of the 69 %.
# FlashAttention-2, which earlier versions took, reaches 322.
_HOPPER_FLOPS = {
    "float64": 67e12, "float32": 67e12, "tf32": 494.5e12, "bfloat16": 989.5e12, "float16": 989.5e12,
    "float8_e4m3fn": 1979e12, "float8_e5m2": 1979e12,
}  # fmt: skip
_H100 = HardwareProfile(
    name="h100",
    backend="nccl",
    flops=_HOPPER_FLOPS,
    matmul_efficiency=0.69,
    memory_bytes=_memory(79),
    memory_bytes_per_s=3.35e12,
    host_bytes_per_s=64e9,
    memory_efficiency=_HBM_EFFICIENCY,
    kernel_s=_GPU_KERNEL_S,
    ranks_per_node=8,
    inside=_nvlink(900e9, _HOPPER_SLOWS),
    between=_infiniband(400, _HOPPER_SLOWS),
    attention_efficiency=0.76,
)

# NVIDIA H200 Tensor Core GPU data sheet, H200 SXM: the compute figures of H100 SXM; 141 GB, 4.8 TB/s; NVLink 900 GB/s.
# DGX H200: the adapters of DGX H100. Matmuls as on H100 (the same source).
_H200 = dataclasses.replace(_H100, name="h200", memory_bytes=_memory(139), memory_bytes_per_s=4.8e12)

# NVIDIA Blackwell architecture technical brief and HGX B200 page, one of eight GPUs: FP64 40, FP32 80, dense TF32
# 1,100, BF16 and FP16 2,250 (36 PFLOPS for eight, with sparsity), FP8 4,500 TFLOPS; NVLink 1.8 TB/s. DGX B200 data
# sheet: 1,440 GB and 64 TB/s for eight, ConnectX-7 of 400 Gb/s for each, hosts with PCIe Gen5. Matmuls: 1,426 of 2,250
# at the power limit, within 10.4 % of one another, so 1,352 on the slowest of eight (the same page as for H200).
# Attention: 1,418 forward, 1,118 backward, together 1,190 with FlashAttention-4 (Dao-AILab/flash-attention, pull
# request 2280): 53 of the 60 %. cuDNN's kernel is taken to be alike.
_B200 = dataclasses.replace(
    _H100,
    name="b200",
    flops={
        "float64": 40e12, "float32": 80e12, "tf32": 1100e12, "bfloat16": 2250e12, "float16": 2250e12,
        "float8_e4m3fn": 4500e12, "float8_e5m2": 4500e12,
    },
    matmul_efficiency=0.6,
    memory_bytes=_memory(178),
    memory_bytes_per_s=8e12,
    inside=_nvlink(1800e9, _HOPPER_SLOWS),
    attention_efficiency=0.88,
)  # fmt: skip

# NVIDIA GB200 NVL72 data sheet, one of 72 GPUs: FP64 40, FP32 80, dense TF32 1,250, BF16 and FP16 2,500, FP8 5,000
# TFLOPS; 186 GB (2 GiB are taken off, as of a B200), 8 TB/s; NVLink 1.8 TB/s between all 72; NVLink-C2C 900 GB/s, of
# both directions, between a CPU and its two GPUs; ConnectX-7 of 400 Gb/s for each. Matmuls: the best shape reaches
# 1,822 in a short burst (stas00/ml-engineering, compute/accelerator/README.md), 73 % where a B200 reaches 78. Nothing
# was found for long runs and for attention: the shares of a B200. All-reduces between 72 reach 839 of 900 GB/s with
# NVLink SHARP (coreweave/nccl-tests, pull request 43), which does nothing for gathers.
_GB200 = dataclasses.replace(
    _B200,
    name="gb200",
    flops={
        "float64": 40e12, "float32": 80e12, "tf32": 1250e12, "bfloat16": 2500e12, "float16": 2500e12,
        "float8_e4m3fn": 5000e12, "float8_e5m2": 5000e12,
    },
    memory_bytes=_memory(184),
    host_bytes_per_s=225e9,
    ranks_per_node=72,
)  # fmt: skip

# One core of a server and gloo: no data sheet says what a rank has of a CPU. These are round figures from `fsdp-compile
# calibrate` on two cores of an AMD EPYC with AVX-512 for bfloat16, one core a rank, over loopback, where those cores
# copy the bytes. Between nodes, an Ethernet of 10 Gbit/s is guessed. The figures are what is reached, not peaks.
_CPU = HardwareProfile(
    name="cpu",
    backend="gloo",
    flops={"float64": 46e9, "float32": 92e9, "bfloat16": 400e9},
    matmul_efficiency=1.0,
    memory_bytes=12 << 30,
    memory_bytes_per_s=30e9,
    host_bytes_per_s=10e9,
    memory_efficiency=1.0,
    kernel_s=2e-6,
    ranks_per_node=64,
    inside=Link(
        latency_s=1.5e-4,
        step_s=1e-4,
        bytes_per_s=0.65e9,
        efficiency=1.0,
        slows_compute=0.45,
        measured={
            "all_gather": Fit(3.5e-4, 0.65e9),
            "reduce_scatter": Fit(5.5e-4, 1.05e9),
            "all_to_all": Fit(2.6e-4, 1.15e9),
            "all_reduce": Fit(5.5e-4, 1.0e9),
        },
        measured_ranks=2,
    ),
    between=Link(latency_s=2e-4, step_s=1e-4, bytes_per_s=1.25e9, efficiency=0.9, slows_compute=0.2),
)

PROFILES = {one.name: one for one in (_CPU, _A100, _H100, _H200, _B200, _GB200)}
