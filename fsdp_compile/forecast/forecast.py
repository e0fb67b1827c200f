"""Forecast one configuration: trace it with few layers, plan it, extend it to all layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..passes.budget.budget import searched
from ..passes.budget.periods import FEW, Periods, periods_of
from ..passes.budget.residency import GATHER, RECOMPUTE
from ..passes.budget.trial import trial_of
from ..passes.cost.memory import GraphMemory, saved_by, weigh
from ..passes.cost.profiles import HardwareProfile
from ..passes.cost.roofline import node_flops
from ..passes.cost.steps import Bytes, Half, Unsettled, lengthened, peak, plus, replay, settled
from ..passes.ir.plan import Choice, Plan
from ..passes.ir.provenance import find_reduces
from .joint import PRECISIONS, device_mesh, joint_graph
from .layers import Run, find_run, with_fewer
from .steps import KINDS, Added, added, extended, half_of, kinds_by_name
from .target import Made

OPTIMIZER = "optimizer state"
# For each optimizer: its states, in multiples of the shards, and how often a step reads or writes the shards' bytes.
OPTIMIZERS = {"adamw": (2, 7), "sgd": (0, 3), "none": (0, 0)}
# How many periods of a model are traced; the next number, where that was too few to see what repeats. Replicas
# begin with the second number: their sums are waited for a layer later.
_FEW = (3, 4, 5)


@dataclass(frozen=True)
class Configuration:
    """The settings that a sweep varies."""

    mesh: tuple[int, ...]
    batch: int
    sequence: int
    checkpointing: str
    budget: int | None = None  # bytes of forward and backward; None: parameters are kept as the units' settings say
    may: tuple[str, ...] = (GATHER, RECOMPUTE)  # what is chosen within it

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        return f"mesh {mesh}, batch {self.batch}x{self.sequence}, checkpointing {self.checkpointing}"


@dataclass(frozen=True)
class Hardware:
    """The hardware that a step is planned for, and its precision and optimizer."""

    profile: HardwareProfile
    memory_bytes: int  # that a rank may use
    num_ranks: int
    precision: str
    optimizer: str

    @property
    def peak_flops(self) -> float:
        stored, computed, _ = PRECISIONS[self.precision]
        dtype = str(computed or stored).removeprefix("torch.")
        return self.profile.flops.get(dtype, self.profile.flops["float32"])


@dataclass(frozen=True)
class Forecast:
    """The memory and time of a step on one rank."""

    configuration: Configuration
    hardware: Hardware
    peak: dict[str, int]  # by kind
    forward_s: float
    backward_s: float
    optimizer_s: float
    exposed_s: float
    num_tokens: int  # of all ranks
    flops: float  # of one rank: forward and backward, nothing computed twice
    num_traced: int  # layers that were traced
    num_periods: int  # layers that repeat
    choice: Choice | None  # within the budget

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def held_bytes(self) -> int:
        """The bytes that forward and backward hold, which a budget limits."""
        return self.peak_bytes - self.peak.get(OPTIMIZER, 0)

    @property
    def is_met(self) -> bool:
        """Whether the budget is met, if there is one."""
        budget = self.configuration.budget
        return budget is None or self.held_bytes <= budget

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.hardware.memory_bytes

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def tokens_per_s_per_rank(self) -> float:
        return self.tokens_per_s / self.hardware.num_ranks

    @property
    def mfu(self) -> float:
        return self.flops / self.step_s / self.hardware.peak_flops


@dataclass(frozen=True)
class Whole:
    """Both halves of a step."""

    forward: Half
    backward: Half

    def peak(self) -> Bytes:
        return max(peak(self.forward), peak(self.backward), key=sum)


class Planner:
    """Plans one model, batch, mesh and kind of checkpointing, within any budget."""

    def __init__(
        self, made: Made, configuration: Configuration, hardware: Hardware, told: Callable[[str], None] = lambda _: None
    ) -> None:
        self.made, self.configuration, self.hardware, self._told = made, configuration, hardware, told
        self.run: Run | None = find_run(made.model)
        self._joints: dict[int, tuple[fx.Graph, Plan]] = {}
        self._wholes: dict[int, Whole] = {}
        self._choice: Choice | None = None

    @property
    def num_periods(self) -> int:
        return 1 if self.run is None else self.run.times

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return device_mesh(self.configuration.mesh)

    def joint(self, times: int) -> tuple[fx.Graph, Plan]:
        """Return the joint graph with ``times`` periods, and its plan."""
        if times not in self._joints:
            model, run = self.made.model, self.run
            if run is not None:
                model, run = with_fewer(model, run, times), dataclasses.replace(run, times=times)
                self._told(f"tracing {times * run.period} of {self.num_periods * run.period} layers")
            how = self.configuration.checkpointing
            self._joints[times] = joint_graph(model, self.made.call, self._mesh, self.hardware.precision, how, run)
        return self._joints[times]

    def few(self, times: int) -> Whole:
        """Plan a step with ``times`` periods."""
        if times not in self._wholes:
            joint, plan = self.joint(times)
            self._told(f"planning {times} of {self.num_periods} repeated parts")
            self._wholes[times] = whole_of(plan, self.hardware.profile, Periods(joint))
        return self._wholes[times]

    def all_alike(self) -> tuple[Whole, int]:
        """Return a step with all periods, and how many were traced."""
        if self.configuration.budget is not None:
            return self._within(self.configuration.budget)
        for times in _FEW[len(self.configuration.mesh) - 1 :]:
            if times + 1 >= self.num_periods:
                break
            shorter, longer = self.few(times), self.few(times + 1)
            more = _added(shorter, longer)
            if more is not None:
                return _extended(shorter, (more, self.num_periods - times)), times + 1
        return self.few(self.num_periods), self.num_periods

    def _within(self, budget: int) -> tuple[Whole, int]:
        """Return a step with all periods within a budget, by the search of a compilation, and how many were traced."""
        times = min(self.num_periods, FEW)
        joint, _ = self.joint(times)
        left_out = (self.num_periods - times) * (self.run.period if self.run else 1)
        self._told(f"choosing for {self.num_periods} repeated parts")
        profile, may = self.hardware.profile, self.configuration.may
        try:
            periods = periods_of(joint, left_out)
            plan = searched(joint, lambda _: budget, profile, may, periods)
        except Unsettled:
            times = self.num_periods
            joint, _ = self.joint(times)
            periods = Periods(joint)
            plan = searched(joint, lambda _: budget, profile, may, periods)
        self._choice = plan.choice
        return whole_of(plan, profile, periods), times

    def forecast(self) -> Forecast:
        """Forecast by what is chosen within the budget; without one, by the settings of the units."""
        whole, num_traced = self.all_alike()
        first, then = replay(whole.forward), replay(whole.backward)
        states, passes = OPTIMIZERS[self.hardware.optimizer]
        trainable = int(self._of_all(_trainable_bytes, num_traced))
        profile = self.hardware.profile
        period = self.run.period if self.run else 1
        return Forecast(
            self.configuration,
            self.hardware,
            {**dict(zip(KINDS, whole.peak())), OPTIMIZER: states * trainable},
            first.total_s,
            then.total_s,
            passes * trainable / (profile.memory_bytes_per_s * profile.memory_efficiency),
            first.exposed_s + then.exposed_s,
            self.made.num_tokens * self.hardware.num_ranks,
            self._of_all(_flops, num_traced),
            num_traced * period,
            self.num_periods * period,
            self._choice,
        )

    def _of_all(self, figure: Callable[[fx.Graph], float], num_traced: int) -> float:
        """Extend a figure to all periods; it grows by the same amount with each."""
        few = num_traced if num_traced == self.num_periods else _FEW[len(self.configuration.mesh) - 1] + 1
        joint, _ = self.joint(few)
        longer = figure(joint)
        if few == self.num_periods:
            return longer
        joint, _ = self.joint(few - 1)
        return longer + (self.num_periods - few) * (longer - figure(joint))


def whole_of(plan: Plan, profile: HardwareProfile, periods: Periods) -> Whole:
    """Return the step of all periods with what this plan keeps, recomputes and offloads."""
    few = periods.compressed(plan.keep, plan.recompute, plan.slices, plan.offload)
    assert few is not None
    (keep, recompute, slices, offload), blocks = few
    trial = trial_of(periods.graph, keep, profile, None, False, recompute, slices, plan.lookahead, offload)
    forward, backward = trial.forward.graph, trial.backward.graph
    weight = weigh(GraphMemory.of(forward), GraphMemory.of(backward), saved_by(forward, backward))
    first = half_of(forward, profile, turns=periods.forward)
    then = half_of(backward, profile, weight.given_up, kinds_by_name(forward), periods.backward)
    returned = tuple(weight.returned_bytes if kind == "activations" else 0 for kind in KINDS)
    # What the caller holds in backward, it held in forward as well, or forward returned it.
    then = dataclasses.replace(then, held=plus(first.held, returned))
    more_held = tuple(sum(blocks.values()) * periods.held_bytes if kind == "shards" else 0 for kind in KINDS)
    forward_again, backward_again = (settled(half, blocks) for half in trial.halves(periods))
    return Whole(*lengthened((first, then), (forward_again, backward_again), more_held))


def _added(shorter: Whole, longer: Whole) -> tuple[Added, Added] | None:
    """Return what a longer step adds to forward and to backward; None where one of the two cannot be extended."""
    forward, backward = added(shorter.forward, longer.forward), added(shorter.backward, longer.backward)
    return None if forward is None or backward is None else (forward, backward)


def _extended(whole: Whole, more: tuple[tuple[Added, Added], int]) -> Whole:
    (forward, backward), times = more
    return Whole(extended(whole.forward, forward, times), extended(whole.backward, backward, times))


def _flops(joint: fx.Graph) -> float:
    return sum(node_flops(node) for node in joint.nodes if node.op == "call_function")


def _trainable_bytes(joint: fx.Graph) -> float:
    """Return the bytes of this rank's shards that get gradients."""
    total = 0
    for one in find_reduces(joint):
        numel = 1
        for size in one.spec.local_size:
            numel *= size
        total += numel * one.spec.grad_dtype.itemsize
    return total
