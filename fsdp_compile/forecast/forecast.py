"""Forecast one configuration: trace it with few layers, plan it, extend it to all layers."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..passes.budget.budget import searched
from ..passes.budget.periods import FEW, Periods, layers_of, periods_of
from ..passes.budget.residency import GATHER, OFFLOAD, RECOMPUTE
from ..passes.budget.standing import Standing
from ..passes.budget.trial import Decision, trial_as
from ..passes.cost.profiles import HardwareProfile
from ..passes.cost.roofline import node_flops
from ..passes.cost.steps import Blocks, Bytes, Half, Unsettled, lengthened, peak, plus, replay, settled
from ..passes.ir.plan import Choice, Plan
from ..passes.ir.provenance import find_reduces
from .joint import PRECISIONS, joint_graph
from .layers import LayerRun, find_run, with_fewer
from .steps import KINDS, half_of, kinds_by_name
from .target import Made

OPTIMIZER = "optimizer state"


@dataclass(frozen=True)
class Optimizer:
    """What is counted of an optimizer."""

    states: int  # in multiples of the shards
    passes: int  # how often a step reads or writes the shards' bytes
    on_host: bool = False  # the states, but for those that a budget leaves on the device

    @property
    def states_there(self) -> int:
        """The states that cannot leave the device."""
        return 0 if self.on_host else self.states


ON_HOST = "-on-host"
OPTIMIZERS = {
    "adamw": Optimizer(2, 7),
    f"adamw{ON_HOST}": Optimizer(2, 7, on_host=True),
    "sgd": Optimizer(0, 3),
    "none": Optimizer(0, 0),
}
# How many periods of a model are traced without a budget: two alike, with those beside them that may differ. Replicas
# need one more: their sums are waited for a layer later.
_FEW = 5


@dataclass(frozen=True)
class Configuration:
    """The settings that a sweep varies."""

    mesh: tuple[int, ...]
    batch: int
    sequence: int
    checkpointing: str
    budget: int | None = None  # bytes of forward and backward; None: parameters are kept as the units' settings say
    may: tuple[str, ...] = (GATHER, RECOMPUTE)  # what is chosen within it
    is_eager: bool = False  # as FSDP2 runs it without torch.compile

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        how = ", FSDP2 without torch.compile" if self.is_eager else ""
        return f"mesh {mesh}, batch {self.batch}x{self.sequence}, checkpointing {self.checkpointing}{how}"


@dataclass(frozen=True)
class Hardware:
    """The hardware that a step is planned for, and its precision and optimizer."""

    profile: HardwareProfile
    memory_bytes: int  # that a rank may use
    num_ranks: int
    precision: str
    optimizer: str

    @property
    def on_host(self) -> bool:
        """Whether the optimizer's states may be on the host, and are updated on the device."""
        return OPTIMIZERS[self.optimizer].on_host

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
    states_away: int = 0  # bytes of the optimizer's states on the host
    num_hosted: int = 0  # layers whose shards are on the host, the last ones
    shards_away: int = 0  # bytes of these shards

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
class BothHalves:
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
        self.run: LayerRun | None = find_run(made.model)
        self._num_traced = 0  # periods, the last time
        self._choice: Choice | None = None
        self._hosted: frozenset[str] = frozenset()  # parameters whose shards are on the host

    @property
    def num_periods(self) -> int:
        return 1 if self.run is None else self.run.times

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        """The mesh of all graphs: another one would make process groups with other names."""
        mesh = self.configuration.mesh
        return init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])

    def joint(self, times: int) -> tuple[fx.Graph, Plan]:
        """Trace the joint graph with ``times`` periods; return it and its plan."""
        model, run = self.made.model, self.run
        if run is not None:
            model, run = with_fewer(model, run, times), dataclasses.replace(run, times=times)
            self._told(f"tracing {times * run.period} of {self.num_periods * run.period} layers")
        self._num_traced = times
        one, hardware = self.configuration, self.hardware
        chosen_for = None if one.budget is None else hardware.profile
        return joint_graph(
            model, self.made.call, self._mesh, hardware.precision, one.checkpointing, run, chosen_for, one.is_eager
        )

    def all_alike(self) -> tuple[BothHalves, Periods]:
        """Return a step with all periods, and what was traced: few of them, or as many as tell what the others do."""
        few = _FEW + len(self.configuration.mesh) - 1 if self.configuration.budget is None else FEW
        while self.run is not None and few < self.run.times:
            try:
                joint, plan = self.joint(few)
                return self._planned(plan, periods_of(joint, (self.run.times - few) * self.run.period))
            except Unsettled:
                few *= 2
        joint, plan = self.joint(self.num_periods)
        return self._planned(plan, periods_of(joint, few_are=sys.maxsize))

    def _planned(self, plan: Plan, periods: Periods) -> tuple[BothHalves, Periods]:
        """Plan the step, within a budget by the search of a compilation; Unsettled where the periods do not tell it."""
        self._told(f"planning {self.num_periods} repeated parts")
        profile, budget, may = self.hardware.profile, self.configuration.budget, self.configuration.may
        blocks: Blocks = {range(len(periods.few)): periods.num_left_out} if periods.num_left_out else {}
        sets = map(frozenset, (plan.keep, plan.recompute, plan.slices, plan.offload))
        decision = Decision(*sets, lookahead=plan.lookahead)
        if budget is not None:
            states = self._states_bytes(periods) if OFFLOAD in may else 0
            decision, self._choice = searched(periods.graph, lambda _: budget, profile, may, periods, states)
            self._hosted = decision.hosted
            few = periods.compressed(*decision.names)
            assert few is not None
            its, blocks = few
            decision = Decision(*its, lookahead=decision.lookahead)
        return both_halves(decision, profile, periods, blocks, self.configuration.is_eager), periods

    def forecast(self) -> Forecast:
        """Forecast by what is chosen within the budget; without one, by the settings of the units."""
        whole, periods = self.all_alike()
        first, then = replay(whole.forward), replay(whole.backward)
        optimizer, profile = OPTIMIZERS[self.hardware.optimizer], self.hardware.profile
        trainable = self._trained_bytes(periods)
        may_leave = self._states_bytes(periods)
        away = may_leave - (0 if self._choice is None else self._choice.kept_states_bytes)
        updating_s = optimizer.passes * trainable / (profile.memory_bytes_per_s * profile.memory_efficiency)
        period = self.run.period if self.run else 1
        num_hosted = periods.num_with(self._hosted)
        copied_bytes = away + num_hosted * periods.updated_bytes
        return Forecast(
            self.configuration,
            self.hardware,
            {**dict(zip(KINDS, whole.peak())), OPTIMIZER: optimizer.states * trainable - away},
            first.total_s,
            then.total_s,
            max(updating_s, Standing(profile).states_seconds(copied_bytes)),  # the copies run beside it
            first.exposed_s + then.exposed_s,
            self.made.num_tokens * self.hardware.num_ranks,
            _of_all(_flops(periods.graph), periods),
            self._num_traced * period,
            self.num_periods * period,
            self._choice,
            away,
            len(layers_of(self._hosted)),
            num_hosted * periods.held_bytes,
        )

    def _states_bytes(self, periods: Periods) -> int:
        """Return the bytes of the optimizer's states that may be on the host."""
        optimizer = OPTIMIZERS[self.hardware.optimizer]
        return (optimizer.states - optimizer.states_there) * self._trained_bytes(periods)

    def _trained_bytes(self, periods: Periods) -> int:
        return int(_of_all(_trainable_bytes(periods.graph), periods))


def both_halves(
    its: Decision, profile: HardwareProfile, periods: Periods, blocks: Blocks, is_eager: bool = False
) -> BothHalves:
    """Return both halves of a step: ``its`` is decided for few periods, and ``blocks`` says how many more are alike."""
    trial = trial_as(its, periods.graph, profile, like_fsdp2=is_eager)
    first = half_of(trial.forward, periods.forward, (), {})
    then = half_of(trial.backward, periods.backward, trial.weight.given_up, kinds_by_name(trial.forward.graph))
    returned = tuple(trial.weight.returned_bytes if kind == "activations" else 0 for kind in KINDS)
    # What the caller holds in backward, it held in forward as well, or forward returned it.
    then = dataclasses.replace(then, held=plus(first.held, returned))
    held_bytes = periods.num_more(blocks, its.hosted) * periods.held_bytes
    more_held = tuple(held_bytes if kind == "shards" else 0 for kind in KINDS)
    return BothHalves(*lengthened((first, then), (settled(first, blocks), settled(then, blocks)), more_held))


def _of_all(figures: Mapping[fx.Node, float], periods: Periods) -> float:
    """Return the sum of figures by node, in which one of the periods stands for those that were not traced."""
    turns = {**periods.forward, **periods.backward}
    return sum(one * (1 + periods.num_left_out * (turns.get(node.name) == (False, 0))) for node, one in figures.items())


def _flops(joint: fx.Graph) -> dict[fx.Node, float]:
    return {node: node_flops(node) for node in joint.nodes if node.op == "call_function"}


def _trainable_bytes(joint: fx.Graph) -> dict[fx.Node, float]:
    """Return the bytes of this rank's shards that get gradients."""
    reduced = ((one.node, one.spec) for one in find_reduces(joint))
    return {node: math.prod(spec.local_size) * spec.grad_dtype.itemsize for node, spec in reduced}
