"""The compiler half: FX in, FX out. Knows torch, and nothing of ``nn.Module`` or of the rest of fsdp_compile.

    joint graph            merge    one marker a parameter
                           slices   where a slice of it is kept for backward, that stands between gather and readers
                           keep     tag each gathered parameter: save it, or gather again in backward
    --- AOTAutograd's partitioner splits forward from backward ---
    forward, backward      insert   markers become collectives, bucketed
                                    with offloaded shards, copies from the CPU before and back to it after
                           overlap  launch a unit ahead, wait at the use
                           check    the result is legal
    --- Inductor lowers, fuses, sorts ---
    scheduler's nodes      schedule the same order again, on what will be generated

The list that runs is in manager.py.
"""

from .manager import JOINT_PASSES as JOINT_PASSES
from .manager import POST_GRAD_PASSES as POST_GRAD_PASSES
from .manager import GraphRecord as GraphRecord
from .manager import PassManager as PassManager
from .manager import PassRecord as PassRecord
from .manager import source_hash as source_hash
from .plan import Bucket as Bucket
from .plan import Plan as Plan
from .schedule import ScheduleInPlannedOrder as ScheduleInPlannedOrder
from .spec import ParamSpec as ParamSpec
