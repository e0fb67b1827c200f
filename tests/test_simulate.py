"""The replay of events, against time lines drawn by hand and a clock that ticks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from expecttest import assert_expected_inline

from fsdp_compile.passes import Compute, Launch, Wait, events_of, load_profile, memory_curve, simulate
from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.apply.overlap import overlap
from fsdp_compile.passes.cost.replay import LATE, LONG, QUEUED, SHARED, Event, Span
from fsdp_compile.passes.cost.roofline import Group, collective_seconds, graph_seconds
from fsdp_compile.passes.schedule.planner import plan_graph
from tests.test_passes import Builder, spec

aten = torch.ops.aten
CPU = load_profile("cpu")
GROUPS = {"g": Group(2, 2)}


def test_a_replay_has_lanes_and_prints_as_a_report() -> None:
    """A collective that is hidden costs nothing; those of a group queue, and those of two groups on two links do not."""
    events = [
        Launch("w1", 4e-3, "g", allocs=(("w1", 2048),)), Launch("w2", 1e-3, "g"), Launch("hidden", 1e-3, "h"),
        Compute("a", 1e-3), Wait("hidden"), Wait("w1"), Wait("w2"), Compute("grad", 1e-3),
        Launch("r", 2e-3, "g", needs=("grad",)), Wait("r"),
    ]  # fmt: skip
    found = simulate(events)
    lanes = {
        group: [(one.name, round(one.start_s, 9), round(one.end_s, 9)) for one in spans]
        for group, spans in found.groups.items()
    }
    assert lanes == {"g": [("w1", 0, 4e-3), ("w2", 4e-3, 5e-3), ("r", 6e-3, 8e-3)], "h": [("hidden", 0, 1e-3)]}
    assert [one.name for one in found.compute] == ["a", "grad"] and found.exposed_s == pytest.approx(6e-3)
    assert [(one.name, one.reason) for one in found.exposed] == [("w1", LONG), ("w2", QUEUED), ("r", LATE)]
    assert_expected_inline(str(found), """\
8.000 ms: 2.000 ms computing, 6.000 ms waiting; peak 2,048 bytes at w1
        3.000 ms for w1: longer than the compute beside it (it takes 4.000 ms and 1.000 ms of compute stand beside it)
        1.000 ms for w2: queued behind another one (4.000 ms behind w1; it takes 1.000 ms and 1.000 ms of compute stand beside it)
        2.000 ms for r: launched as soon as what it needs was there (right after grad; it takes 2.000 ms and 0.000 ms of compute stand beside it)""")


def test_what_could_not_have_been_launched_earlier_is_told_from_what_could() -> None:
    def reason(*between: Event) -> str:
        events = [Compute("grad", 1.0), Compute("cast", 0.5, is_copy=True), *between]
        events += [Launch("r", 3.0, "g", needs=("grad",)), Compute("next", 1.0), Wait("r")]
        *_, exposed = simulate(events).exposed
        return exposed.reason

    assert reason() == LATE
    assert reason(Compute("view", 0.0)) == LATE
    assert reason(Compute("other", 1.0)) == LONG  # it could have gone before that
    gather = Launch("gather", 5.0, "h")
    assert reason(gather, Wait("gather")) == LONG  # and before one has waited 5 s for something else
    assert reason(dataclasses.replace(gather, seconds=0.0), Wait("gather")) == LATE


def test_a_collective_slows_down_what_runs_beside_it() -> None:
    slow = [Launch("g", 4.0, "g", slows_compute=0.5), Compute("a", 1.0), Compute("b", 3.0), Wait("g")]
    found = simulate(slow)
    # a at half speed until 2; b has done 1 of 3 at 4, when the gather ends.
    assert found.compute == (Span("a", 0, 2), Span("b", 2, 6)) and found.total_s == 6 and found.exposed == ()
    two = [dataclasses.replace(slow[0], name="h", group="h"), *slow, Wait("h")]
    assert simulate(two).compute[0] == Span("a", 0, 4)


def test_groups_on_one_link_share_it() -> None:
    events = [
        Launch("shards", 4.0, "g", link="between"), Compute("a", 1.0), Launch("replicas", 1.0, "h", link="between"),
        Launch("inside", 1.0, "i", link="inside"), Launch("behind", 1.0, "h", link="between"), Wait("replicas"),
        Wait("shards"), Wait("behind"), Wait("inside"),
    ]  # fmt: skip
    found = simulate(events)
    # At 1, 3 of the shards are left. Both replicas' take twice as long, from 1 to 3 and from 3 to 5; then 1 is left.
    assert found.groups == {
        "g": (Span("shards", 0, 6),), "h": (Span("replicas", 1, 3), Span("behind", 3, 5)), "i": (Span("inside", 1, 2),),
    }  # fmt: skip
    assert [(one.name, one.exposed_s, one.reason) for one in found.exposed] == [
        ("replicas", 2.0, SHARED), ("shards", 3.0, SHARED)
    ]  # fmt: skip
    assert (found.total_s, found.exposed_s) == (6.0, 5.0)


def test_memory_is_the_buffers_of_the_events_above_what_is_held() -> None:
    events = [
        Launch("g", 1.0, "g", allocs=(("w", 100),)),
        Compute("a", 2.0, allocs=(("x", 30), ("tmp", 5)), frees=("tmp",)),
        Wait("g", allocs=(("unpacked", 100),), frees=("w",)),
        Compute("b", 1.0, allocs=(("y", 1),), frees=("unpacked", "x")),
        Compute("c", 1.0),
    ]
    found = simulate(events, held_bytes=1000)
    assert [(point.event, point.at_s, point.num_bytes) for point in found.memory] == [
        ("g", 0.0, 1100), ("a", 0.0, 1135), ("g", 2.0, 1230), ("b", 2.0, 1131), ("c", 3.0, 1001),
    ]  # fmt: skip
    assert (found.peak_bytes, found.peak_at) == (1230, "g")
    assert (simulate([]).total_s, simulate([]).peak_bytes, simulate([]).peak_at) == (0.0, 0, "")


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([Wait("g")], "wait for g, which nothing launched before. Move the wait"),
        ([Wait("g"), Launch("g", 1.0, "p")], "wait for g, which nothing launched before"),
        ([Launch("g", 1.0, "p")], "g is launched, and nothing waits for it. Add a wait for g"),
        ([Launch("g", 1.0, "p"), Wait("g"), Wait("g")], "wait for g twice. Take the second wait out"),
        ([Launch("g", 1.0, "p"), Launch("g", 1.0, "p")], "g is launched twice. Give each collective a name of its own"),
        ([Compute("a", 1.0), Compute("a", 1.0)], "a stands twice in the events. Give each a name of its own"),
        ([Compute("a", 1.0), Launch("a", 1.0, "p")], "a is the name of a compute and of a collective"),
        ([Launch("a", 1.0, "p"), Compute("a", 1.0)], "a is the name of a compute and of a collective"),
        ([Compute("a", -1.0)], "a takes -1.0 seconds. Give a number that is at least 0"),
        ([Launch("g", float("nan"), "p")], "g takes nan seconds"),
        ([Launch("g", 1.0, "p", slows_compute=1.0)], "g slows compute by 1.0. Give a share from 0 to below 1"),
        ([Launch("g", 1.0, "p", needs=("a",)), Wait("g")], "g is launched before a, which it needs, has run or been waited"),
        ([Launch("h", 1.0, "p"), Launch("g", 1.0, "p", needs=("h",))], "g is launched before h, which it needs"),
        ([Compute("a", 1.0, frees=("x",))], "a frees x, which is not alive. Allocate it, and free it once"),
        ([Compute("a", 1.0, (("x", 1),)), Compute("b", 1.0, (("x", 1),))], "b allocates x, which is alive"),
        ([Compute("a", 1.0, (("x", -1),))], "a allocates -1 bytes for x"),
    ],
)  # fmt: skip
def test_an_order_that_cannot_be_is_refused(events: list[Event], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        simulate(events)


def ticking(events: Sequence[Event], dt: float) -> float:
    """The end of the events by a clock that only knows what goes on in each tick."""
    left = {one.name: one.seconds for one in events if isinstance(one, Launch)}
    queues: dict[str, list[Launch]] = {}
    done, now = set[str](), 0.0

    def tick() -> float:
        """Let all lanes run on for a tick; how fast computation went in it."""
        nonlocal now
        speed = 1.0
        heads = [queue[0] for queue in queues.values() if queue]
        for queue in queues.values():
            if queue:
                speed *= 1 - queue[0].slows_compute
                left[queue[0].name] -= dt / max(sum(one.link == queue[0].link != "" for one in heads), 1)
                if left[queue[0].name] <= 1e-9:
                    done.add(queue.pop(0).name)
        now += dt
        return speed

    for event in events:
        if isinstance(event, Launch):
            queues.setdefault(event.group, []).append(event)
        elif isinstance(event, Wait):
            while event.name not in done:
                tick()
        else:
            work = event.seconds
            while work > 1e-9:
                work -= tick() * dt
    return now


def random_events(rng: random.Random, slows: bool, links: Mapping[str, str]) -> list[Event]:
    events: list[Event] = []
    flying: list[str] = []
    for number in range(rng.randint(5, 40)):
        choice = rng.random()
        if choice < 0.4:
            events.append(Compute(f"c{number}", float(rng.randint(1, 5))))
        elif choice < 0.75:
            share = rng.choice([0.0, 0.25, 0.5]) if slows else 0.0
            group = rng.choice("xyz")
            launch = Launch(f"g{number}", float(rng.randint(1, 6)), group, slows_compute=share, link=links.get(group, ""))
            events.append(launch)
            flying.append(f"g{number}")
        elif flying:
            events.append(Wait(flying.pop(rng.randrange(len(flying)))))
    return [*events, *map(Wait, flying)]


@pytest.mark.parametrize(
    ("slows", "links", "times", "dt"),
    [(False, {}, 300, 1.0), (True, {}, 40, 1 / 64), (True, {"x": "wire", "y": "wire"}, 40, 1 / 64)],
)
def test_a_clock_that_ticks_finds_the_same_end(slows: bool, links: Mapping[str, str], times: int, dt: float) -> None:
    rng = random.Random(slows)
    for _ in range(times):
        events = random_events(rng, slows, links)
        found = simulate(events)
        # Where compute is slowed down, work ends within a tick, and the clock has it last to the tick's end.
        assert found.total_s == pytest.approx(ticking(events, dt), abs=2 * dt * len(events) if slows else None)
        assert found.total_s == pytest.approx(found.compute_s + found.exposed_s)


def test_a_lowered_graph_gives_its_launches_waits_and_kernels() -> None:
    """A forward of two units, each gathered over two ranks."""
    b = Builder()
    shards = [b.input(f"shard{index}", 128, 256) for index in range(2)]
    x = b.input("x", 512, 256)
    specs = [spec("weight", (256, 256), local_length=128, bucketing="none") for _ in range(2)]
    weights = [
        b.unshard(shard, its_spec, f"layers.{index}") for index, (shard, its_spec) in enumerate(zip(shards, specs))
    ]
    for weight in weights:
        x = b.call(aten.mm.default, x, b.call(aten.t.default, weight))
    graph = b.output(x)
    plan = plan_graph(graph, "forward")
    insert(graph, plan)
    overlap(graph, plan)
    events = events_of(graph, CPU, GROUPS)
    gather_s = collective_seconds("all_gather", 256 * 256 * 4, Group(2, 2), CPU)
    kinds = [(type(one).__name__, one.name) for one in events]
    # Each wait stands where its weight is read: the second gather is in flight beside the first matmul.
    assert kinds == [
        ("Launch", "all_gather_into_tensor_default"), ("Launch", "all_gather_into_tensor_default_1"),
        ("Wait", "all_gather_into_tensor_default"), ("Compute", "t_default"), ("Compute", "mm_default"),
        ("Wait", "all_gather_into_tensor_default_1"), ("Compute", "t_default_1"), ("Compute", "mm_default_1"),
    ]  # fmt: skip
    launches = [one for one in events if isinstance(one, Launch)]
    assert {(one.group, one.seconds, one.slows_compute) for one in launches} == {
        ("g", gather_s, CPU.inside.slows_compute)
    }
    seconds = {node.name: value for node, value in graph_seconds(graph, CPU).items()}
    computes = {one.name: one.seconds for one in events if isinstance(one, Compute)}
    assert computes == {name: seconds.get(name, 0.0) for name in computes} and computes["mm_default"] > 0


def test_a_graph_with_markers_is_refused() -> None:
    b = Builder()
    graph = b.output(b.call(aten.relu.default, b.unshard(b.input("shard", 2, 3), spec())))
    with pytest.raises(ValueError, match="not lowered: give a forward, backward or inference record's graph, from a"):
        events_of(graph, CPU, GROUPS)


def test_what_is_written_over_is_freed_by_the_last_call_before_that() -> None:
    b = Builder()
    first = b.call(aten.mm.default, b.input("x", 8, 8), b.input("y", 8, 8))
    constant = b.graph.get_attr("constant")
    with b.mode:
        constant.meta["val"] = torch.empty(8, 8)
    over = b.call(aten.add.Tensor, first, constant)
    graph = b.output(b.call(aten.mm.default, over, over))
    events = events_of(graph, CPU)
    assert [(one.name, one.frees) for one in events] == [
        ("mm_default", ("mm_default",)), ("add_tensor", ()), ("mm_default_1", ("add_tensor",))
    ]  # fmt: skip
    assert simulate(events).peak_bytes == memory_curve(graph, fused=True).peak_bytes == 2 * 8 * 8 * 4


def test_a_reduction_that_waits_for_its_gradient_is_said_to_be_late() -> None:
    b = Builder()
    x, tangent = b.input("x", 512, 256), b.input("tangents_1", 512, 256)
    grad = b.call(aten.mm.default, b.call(aten.t.default, tangent), x)
    graph = b.output(b.reduce(grad, spec("weight", (256, 256), local_length=128, reduce_dtype=torch.float64)))
    plan = plan_graph(graph, "backward")
    insert(graph, plan)
    events = events_of(graph, CPU, GROUPS)
    launch = next(one for one in events if isinstance(one, Launch))
    assert launch.needs == ("mm_default",)  # not the cast, which would come along
    (exposed,) = simulate(events).exposed
    assert (exposed.reason, exposed.name) == (LATE, "reduce_scatter_tensor_default")
    with pytest.raises(ValueError, match=r"speaks to the group 'g', but groups has none\. Add it"):
        events_of(graph, CPU, {})
