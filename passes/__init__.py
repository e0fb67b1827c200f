"""The compiler half: passes over FX graphs. They know torch, and nothing of ``nn.Module`` or the rest of fsdp_compile.

    joint graph            merge    leave one marker for each parameter
                           slices   where a slice is kept for backward, put it between the gather and its readers
                           parts    have backward recompute what an all-gather extension makes of gathered tensors
                           chosen_slices  like slices, where the plan keeps a slice to meet a memory budget
                           keep     tag each gathered parameter (save it, or gather it again) and its readers
    or, where backward was traced into the graph of its forward, so that no partitioner splits the graph:
    whole step             parts, regather (backward gathers again), merge; before Inductor: write_out
    --- AOTAutograd's partitioner splits forward from backward ---
    forward, backward      insert   markers become collectives, bucketed
                                    offloaded shards are copied from the CPU before, and gradients back to it after
                           overlap  launch a unit ahead, wait at the use
                           check    assert that the result is legal
                           announce the graph begins with a list of its launches
                           order    Inductor keeps the order of launches, waits and products
    --- Inductor lowers, fuses, sorts ---

The lists that run are in manager.py. These modules predict what a graph costs, without running it:

    profiles   what hardware can do        cost    seconds of a node, of a collective      memory   bytes alive
    events     of a lowered graph          replay  simulate: their time line, what is exposed and why
    weigh      bytes of both halves        predicted  all of this, for the graphs that run     reasons  why kept or not
    owners     what the memory holds       verdicts   what keeps a collective from being hidden

With a memory budget, these modules choose what is kept from forward to backward:

    budget     a budget, and its plan      residency  the candidates, and the best of them
    trial      predicts one candidate      residents  what may stay, and the seconds that it saves
    activations  what backward could recompute        settle     one rank decides, the others adopt
                                           choice     the reasons, which the plan carries
"""

from .budget import Budget as Budget
from .choice import Candidate as Candidate
from .choice import Choice as Choice
from .cost import Group as Group
from .cost import collective_seconds as collective_seconds
from .cost import graph_seconds as graph_seconds
from .cost import node_seconds as node_seconds
from .events import events_of as events_of
from .manager import JOINT_PASSES as JOINT_PASSES
from .manager import POST_GRAD_PASSES as POST_GRAD_PASSES
from .manager import GraphRecord as GraphRecord
from .manager import PassManager as PassManager
from .manager import PassRecord as PassRecord
from .memory import MemoryCurve as MemoryCurve
from .memory import memory_curve as memory_curve
from .memory import saved_inputs as saved_inputs
from .plan import Bucket as Bucket
from .plan import Plan as Plan
from .predicted import Prediction as Prediction
from .profiles import HardwareProfile as HardwareProfile
from .profiles import Link as Link
from .profiles import load_profile as load_profile
from .replay import Compute as Compute
from .replay import Launch as Launch
from .replay import Timeline as Timeline
from .replay import Wait as Wait
from .replay import simulate as simulate
from .source import source_hash as source_hash
from .spec import ParamSpec as ParamSpec
