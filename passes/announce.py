"""A graph says, before its first launch, what it is going to launch.

    before    g0 = all_gather(s0)   ...   r1 = all_to_all(...)   ...
    after     begin([s0, s1], "forward ... all_gather w0 ... all_to_all w1 ...")   g0 = all_gather(s0)   ...   r1 = ...

For ranks that part: see ledger.py; and with all of the plan of the step, for who asks where no pass ran because the
graph came from a cache. One call a graph, which takes microseconds. What it takes besides the text are
inputs of the graph, so that it can stand first: a shard of each unit tells, when the graph runs, whose units these are.
A forward says as well what its backward will launch, as the plan of the step has it: whoever follows it from the first
step on cannot know that yet.
"""

from __future__ import annotations

from torch import Tensor, fx

from .collectives import KINDS, is_launch
from .emit import emit
from .insert import ROLE, Role
from .keep import STEP
from .ledger import GraphText, Launch, Member, begin
from .packing import pack
from .plan import Bucket, Plan


def announce(graph: fx.Graph, plan: Plan) -> int:
    """Let the graph begin with its text; return how many launches that lists."""
    launches = [node for node in graph.nodes if is_launch(node) and ROLE in node.meta]
    inputs = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]
    if not launches or not inputs:
        return 0
    shards: dict[str, tuple[fx.Node, str, Member]] = {}  # of each unit one, with its name
    for launch in launches:
        role: Role = launch.meta[ROLE]
        for place in role.shown if role.kind == "gather" else ():
            shard, shown = _input_behind(launch, place), role.members[place]
            if shard is not None:
                shards.setdefault(shown.unit, (shard, plan.gathers[role.bucket].fqns[place], shown))
    text = GraphText(
        plan.stage,
        launches[0].meta[ROLE].step,
        tuple((name, member) for _, name, member in shards.values()),
        tuple(_as_text(launch, plan) for launch in launches),
        launches[0].meta.get(STEP, plan).packed(),
        _launches_of_backward(graph, plan) if plan.stage == "forward" else None,
    )
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        emit(graph, begin, [shard for shard, *_ in shards.values()] or inputs[:1], text.dumps())
    return len(launches)


def _as_text(launch: fx.Node, plan: Plan) -> Launch:
    role: Role = launch.meta[ROLE]
    bucket = (plan.gathers if role.kind == "gather" else plan.reduces)[role.bucket]
    kind, group = KINDS[launch.target], str(launch.args[-1])
    return Launch(kind, group, bucket.dtype, bucket.num_bytes, bucket.fqns, role.members)


def _launches_of_backward(graph: fx.Graph, plan: Plan) -> tuple[Launch, ...] | None:
    """What the backward of a forward graph will launch; None where the plan of the step does not say all of that."""
    members: dict[str, Member] = {}
    step: Plan | None = None
    for node in graph.nodes:
        role: Role | None = node.meta.get(ROLE)
        if role is not None and role.kind == "gather":
            members.update(zip(plan.gathers[role.bucket].fqns, role.members))
            step = node.meta.get(STEP)
    backward = None if step is None else step.backward
    if backward is None:
        return None
    launches = []
    for kind, index in backward.order:
        bucket = (backward.gathers if kind == "gather" else backward.reduces)[index]
        # Where replicas sum as well, when the second of the two is launched is decided later.
        if not members.keys() >= {*bucket.fqns} or bucket.num_replicas > 1:
            return None
        if bucket.num_ranks > 1:
            launches.append(_planned(kind, bucket, tuple(members[fqn] for fqn in bucket.fqns)))
    return tuple(launches)


def _planned(kind: str, bucket: Bucket, members: tuple[Member, ...]) -> Launch:
    """What a graph that is still to come launches: in which group, and by which of the reductions, its specs say."""
    planned = "all_gather" if kind == "gather" else "reduce"
    return Launch(planned, "", bucket.dtype, bucket.num_bytes, bucket.fqns, members)


def _input_behind(launch: fx.Node, place: int) -> fx.Node | None:
    """The shard that a gather packs in this place, where that is an input of the graph."""
    node = launch
    while node.op != "placeholder" and node.all_input_nodes:
        packs = node.target is pack
        node = node.args[0][place] if packs else node.all_input_nodes[0]  # type: ignore[index,assignment]
    return node if node.op == "placeholder" else None
