"""What profilers show of the eager path.

    FSDP::pre_forward (layers.3 (Block))      gather, and launch what comes next
    FSDP::post_forward ...                    free or keep
    FSDP::pre_backward ...                    gather again, and launch what comes next
    FSDP::post_backward ...                   free, and launch the reduction
    FSDP::end_backward ...                    wait for what is in flight

The prefix is FSDP2's, so that tools which look for it find ours. Compiled code has the ranges of Inductor's kernels and
of the process group instead.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from .._torch_compat import autograd
from ..core.unit import Unit


def span(stage: str, unit: Unit) -> AbstractContextManager[object]:
    """Return a range for the profiler; it does nothing while no profiler runs."""
    if not autograd.profiler_runs():
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"FSDP::{stage} ({unit.name})")
