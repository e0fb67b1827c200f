"""What profilers and logs show of the eager path.

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
import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from . import _torch_compat as compat

if TYPE_CHECKING:
    from ._state import UnitState

logger = logging.getLogger("fsdp_compile")


def span(stage: str, state: UnitState) -> AbstractContextManager[object]:
    """A range in a profile; next to nothing while no profiler runs."""
    if not compat.profiler_runs():
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"FSDP::{stage} ({state.name})")
