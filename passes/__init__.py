"""The compiler half: FX in, FX out. Knows torch, and nothing of ``nn.Module`` or of the rest of fsdp_compile.

    joint graph            merge    one marker a parameter
                           slices   where a slice of it is kept for backward, that stands between gather and readers
                           parts    what an extension makes of gathered tensors is made again
                           chosen_slices  the same where the plan has one kept to meet a budget
                           keep     tag each gathered parameter: save it, or gather again in backward; and its readers
    or, where nothing is to be split because backward was traced into the graph of its forward:
    whole step             parts, regather (backward gathers again), merge; before Inductor: write_out
    --- AOTAutograd's partitioner splits forward from backward ---
    forward, backward      insert   markers become collectives, bucketed
                                    with offloaded shards, copies from the CPU before and back to it after
                           overlap  launch a unit ahead, wait at the use
                           check    the result is legal
                           announce the graph says what it launches, before it does
                           order    Inductor keeps the order of launches, waits and products
    --- Inductor lowers, fuses, sorts ---

The list that runs is in manager.py. What a graph would cost, without running it:

    profiles   what hardware can do        cost    seconds of a node, of a collective      memory   bytes alive
    events     of a lowered graph          replay  simulate: their time line, what is exposed and why
    weigh      both halves of a step       predicted  all of that, of the graphs that run      reasons  of what is kept
    owners     whose memory it is          verdicts   what keeps a collective from being hidden

With a byte budget, what is kept from forward to backward is chosen by that:

    budget     a budget, and its plan      residency  the candidates, and the best of them
    trial      of one candidate            residents  what may stay, and what that is worth
    activations  what backward could compute again    settle     one rank decides, the others adopt
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
