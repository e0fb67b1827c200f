"""The values that travel from the command line to a worker process, and the results that travel back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DTYPES = ("fp32", "bf16")
Mode = Literal["time", "memory", "reference"]


@dataclass(frozen=True)
class Settings:
    """The workload: one model, one batch per rank, one optimizer. The same for every variant."""

    dim: int = 512
    layers: int = 6
    vocab: int = 8192
    batch: int = 2
    seq: int = 128
    ranks: int = 2
    steps: int = 10
    warmup: int = 3
    seed: int = 0
    lr: float = 1e-3
    dtype: str = "fp32"
    param_dtype: str | None = None
    adamw: str = "default"
    device: str = "cpu"
    backend: str = "gloo"
    wire_bytes_per_s: float = 6e8
    """What a scheduler may believe of the wire. Over loopback: two gathers and a reduce-scatter of 28.8M
    parameters put 230 MB on it and took 0.375 s."""


@dataclass(frozen=True)
class Job:
    """What one rank's process is asked to do. `interfaces` and `cores` have one entry per rank; without cores, a
    rank runs on all of them."""

    variant: str
    mode: Mode
    settings: Settings
    run_dir: str
    address: str
    interfaces: tuple[str, ...]
    cores: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True)
class RankResult:
    """What one rank measured. A time run fills the seconds, a memory run the bytes; on a GPU a time run fills both."""

    losses: list[float] = field(default_factory=list)
    setup_s: float = 0.0
    first_step_s: float = 0.0
    warmup_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    sent_bytes_per_step: float = 0.0
    own_cpu_s: float = 0.0
    """Of a timed step, on average: CPU time of the thread that trains. The other threads' is mostly gloo's."""
    other_cpu_s: float = 0.0
    num_graphs: int = 0
    standing_bytes: int = 0
    peak_bytes: list[int] = field(default_factory=list)
