"""Have each graph begin with a call that lists the collectives which the graph is going to launch.

    before    g0 = all_gather(s0)   ...   r1 = all_to_all(...)   ...
    after     begin([s0, s1], "forward ... all_gather w0 ... all_to_all w1 ...")   g0 = all_gather(s0)   ...   r1 = ...

With the text, ranks can be compared (ledger.py). It also contains the plan of the step, which is otherwise unknown in a
process where no pass ran because the graph came from a cache. The call takes microseconds. Its other arguments are
inputs of the graph, so that it can stand first: one shard of each unit, which tells at run time whose units these are.
"""

from __future__ import annotations

from torch import Tensor, fx

from .._torch_compat import arguments_of
from ..ir.meta import ROLE, STEP, Role
from ..ir.nodes import emit
from ..ir.plan import Plan
from ..wire.collectives import KIND_OF, all_gather_members, gather_members_once, is_launch
from ..wire.ledger import GraphText, ListedLaunch, begin
from ..wire.lower import gather_offloaded
from ..wire.packing import pack


def announce(graph: fx.Graph, plan: Plan) -> int:
    """Put the call with the graph's text in front; return how many launches the text lists."""
    launches = [node for node in graph.nodes if is_launch(node) and ROLE in node.meta]
    inputs = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]
    if not launches or not inputs:
        return 0
    shards: dict[str, fx.Node] = {}  # one of each unit
    owners = {owner for launch in launches for owner in arguments_of(launch).get("owners", ())}
    for launch in launches:
        role: Role = launch.meta[ROLE]
        for place in role.shown if role.kind == "gather" else ():
            shard, unit = _input_behind(launch, place), role.members[place].unit
            if shard is not None and (unit not in shards or (shard in owners and shards[unit] not in owners)):
                shards[unit] = shard
    text = GraphText(
        plan.stage,
        launches[0].meta[ROLE].step,
        tuple(shards),
        tuple(_as_text(launch, plan) for launch in launches),
        launches[0].meta.get(STEP, plan).packed(),
    )
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        emit(graph, begin, [*shards.values()] or inputs[:1], text.dumps())
    return len(launches)


def _as_text(launch: fx.Node, plan: Plan) -> ListedLaunch:
    role: Role = launch.meta[ROLE]
    bucket = plan.buckets(role.kind)[role.bucket]
    arguments = arguments_of(launch)
    kind, group, key = KIND_OF[launch.target], str(arguments["group_name"]), str(arguments.get("key", ""))
    return ListedLaunch(kind, group, bucket.dtype, bucket.num_bytes, bucket.fqns, role.members, key)


def _input_behind(launch: fx.Node, place: int) -> fx.Node | None:
    """Return the shard that a gather packs at this place, or None if the shard is not an input of the graph."""
    node = launch
    while node.op != "placeholder" and node.all_input_nodes:
        lists_members = node.target in (pack, all_gather_members, gather_members_once, gather_offloaded)
        node = node.args[0][place] if lists_members else node.all_input_nodes[0]  # type: ignore[index,assignment]
    return node if node.op == "placeholder" else None
