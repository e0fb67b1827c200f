"""The compiler half: passes over FX graphs. They know torch, and nothing of ``nn.Module`` or the rest of fsdp_compile.

    joint graph            merge    leave one marker for each use of a parameter
                           slices   where a slice is kept for backward, put it between the gather and its readers
                           parts    have backward recompute what an all-gather extension makes of gathered tensors
                           chosen_slices  like slices, where the plan keeps a slice to meet a memory budget
                           keep     tag each gathered parameter (save it, or gather it again) and its readers
    or, where backward was traced into the graph of its forward, so that no partitioner splits the graph:
    whole step             parts, gather_by_phase (backward gathers again), merge; before Inductor: write_out
    --- AOTAutograd's partitioner splits forward from backward ---
    forward, backward      insert   markers become collectives, bucketed
                                    offloaded shards are copied from the CPU before, and gradients back to it after
                           overlap  launch a unit ahead, wait at the use
                           check    assert that the result is legal
                           announce the graph begins with a list of its launches
                           order    Inductor keeps the order of launches, waits and products
    --- Inductor lowers, fuses, sorts ---

The lists that run are in manager.py. A folder imports from those above it:

    wire       how a parameter lies in its shard and in a bucket; the programs of collectives; the record of launches
    ir         the two marker ops, their names, the plan, questions about nodes
    schedule   uses, buckets, what backward gathers again, the plan of a joint graph    ranks   what ranks compare
    cost       seconds and bytes of a graph, without running it: roofline, fusion, memory, replay, verdicts
    apply      the passes above
    budget     with a memory budget: the candidates, a trial of each, and the best of them
"""

from .budget.budget import Budget as Budget
from .cost.events import events_of as events_of
from .cost.memory import MemoryCurve as MemoryCurve
from .cost.memory import memory_curve as memory_curve
from .cost.memory import saved_inputs as saved_inputs
from .cost.predicted import Prediction as Prediction
from .cost.profiles import HardwareProfile as HardwareProfile
from .cost.profiles import Link as Link
from .cost.profiles import load_profile as load_profile
from .cost.replay import Compute as Compute
from .cost.replay import Launch as Launch
from .cost.replay import Timeline as Timeline
from .cost.replay import Wait as Wait
from .cost.replay import simulate as simulate
from .cost.roofline import Group as Group
from .cost.roofline import collective_seconds as collective_seconds
from .cost.roofline import graph_seconds as graph_seconds
from .cost.roofline import node_seconds as node_seconds
from .ir.plan import Bucket as Bucket
from .ir.plan import Candidate as Candidate
from .ir.plan import Choice as Choice
from .ir.plan import Plan as Plan
from .manager import JOINT_PASSES as JOINT_PASSES
from .manager import POST_GRAD_PASSES as POST_GRAD_PASSES
from .manager import GraphRecord as GraphRecord
from .manager import PassManager as PassManager
from .manager import PassRecord as PassRecord
from .source import source_hash as source_hash
from .wire.spec import ParamSpec as ParamSpec
