"""Check that a lowered graph is legal: every collective is waited for once, directly, and no marker is left.

    launch = all_gather_into_tensor(...)        a wait reads the collective's own output, views come after it:
    wait   = wait_tensor(launch)                only then does Inductor keep the collective's input alive

Buckets are launched in the plan's order, gathers and reductions alike. A bucket that is also reduced over replicas is
launched a second time for that. Copies to the CPU, and from there, are waited for, too. Gradients that earlier
backwards held back go where something reads them.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from ..ir import markers
from ..ir.meta import ROLE
from ..ir.plan import Plan, num_launches
from ..ir.provenance import has_markers
from ..wire.collectives import is_launch, is_wait
from ..wire.copies import is_copy, to_host, wait_for_copies


def check(graph: fx.Graph, plan: Plan) -> int:
    """Verify the graph against the plan; return the number of our collectives."""
    assert not has_markers(graph), "a marker was not lowered"
    launches = [node for node in graph.nodes if is_launch(node) and ROLE in node.meta]
    for launch in (*launches, *filter(is_copy, graph.nodes)):
        waits = [user for user in launch.users if is_wait(user)]
        assert len(waits) == len(launch.users) == 1, f"{launch} is read by {list(launch.users)}, not by one wait alone"
    launched = Counter((launch.meta[ROLE].kind, launch.meta[ROLE].bucket) for launch in launches)
    planned = {(kind, at): num for kind, at in plan.order if (num := num_launches(plan.buckets(kind)[at]))}
    assert dict(launched) == planned, f"{dict(launched)} are launched, not the plan's {planned}"
    if list(launched) != list(planned):
        raise RuntimeError(
            f"the collectives of this graph would be launched in the order {list(launched)}, and the plan's is "
            f"{list(planned)}: what one of them sends is computed from what a later one brings. Another rank may "
            "launch them otherwise, and hang. Take away passes that were set beside fsdp_compile's, or call "
            "module.set_reshard_after_forward(False) on the units of the graph."
        )
    for resumed in graph.find_nodes(op="call_function", target=markers.resume):
        assert resumed.users, f"nothing reads {resumed}, which takes the gradient that waits"
    for copy in graph.find_nodes(op="call_function", target=to_host):
        is_complete = copy.kwargs.get("wait", True) or any(user.target is wait_for_copies for user in copy.users)
        assert is_complete, f"nothing waits for {copy}"
    return len(launches)
