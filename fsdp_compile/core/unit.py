"""Unit: what one call of fully_shard or replicate made of its modules. Data, on which both paths stand.

    graph/    asks for ``mode_of`` and ``spec_of`` (core/spec.py), puts markers into graphs, and keeps a ``watch``
    eager/    runs the same lowering programs over the same specs, and keeps what is ``running``
    api/      makes units, changes their settings, and generates the classes that send reads to the two paths
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .accumulation import Accumulation, Mode
from .mesh import ShardMesh
from .param import ShardedParam
from .settings import Settings

# What FSDP1's wrappers add to paths (fsdp1/region.py), which users' names leave out.
WRAPPED = "_fsdp_wrapped_module"
_WRAPPED = re.compile(rf"\.?\b{WRAPPED}\b")

STATE = "_fsdp_compile_state"  # the attribute in which a module has its unit
INSIDE = "_fsdp_compile_inside"  # the name in a generated class of its forward inside a graph of its own
CALLS: set[str] = set()  # files whose functions call a unit's module, which tells such a call where it is traced


@dataclass(frozen=True)
class Ends:
    """How the eager path ends a backward, for compiled ones whose gradients wait: handed in, as paths know no other."""

    at_end: Callable[[Unit], None]  # have the end of the backward that runs reduce what waits, and free
    now: Callable[[Unit], None]  # reduce what waits: compiled autograd has no end
    note_reduction: Callable[[Unit], None]  # this backward reduces some


@dataclass(eq=False)
class Unit:
    """Modules, their parameters, and everything that decides how these travel."""

    modules: tuple[nn.Module, ...]
    label: str  # class of the module, or of the modules
    mesh: ShardMesh
    mp_policy: MixedPrecisionPolicy
    mixin: type  # what the modules' classes get as a base
    ends: Ends
    params: list[ShardedParam] = field(default_factory=list)
    overrides: dict[str, torch.dtype] = field(default_factory=dict)  # by FQN, from param_dtype_override_fn
    offload: bool = False  # shards and their gradients stay on the CPU
    pins: bool = False  # shards there are in pinned memory, where there is an accelerator
    # After forward each rank keeps a slice for these few ranks, and backward gathers over them alone.
    post_forward: ShardMesh | None = None
    # The few ranks, where the plan of a step may have slices kept for them: those of a node, with a byte budget.
    may_slice: ShardMesh | None = None
    settings: Settings = field(default_factory=Settings)
    accumulation: Accumulation = field(default_factory=Accumulation)
    # The unit around this one.
    outer: Unit | None = None
    is_root: bool = True
    takes_inputs_to: torch.device | None = None  # of the outermost unit, on accelerators
    eager_only: str | None = None  # the name of what a graph cannot honour
    # Whether graphs can take its full parameters; what an all-gather extension makes is put together in the graph.
    gives_to_graphs: bool = True
    # By place among ``params``: what an eager call around compiled code gives it; None where none stands around.
    given: tuple[torch.Tensor | None, ...] | None = field(default=None, repr=False)
    # Paths of its modules in the model, as they were when somebody last asked: see ``path_of``.
    paths: dict[nn.Module, str] = field(default_factory=dict, repr=False)
    # Counts changes of what the specs say or of the shards, and those of more than single shards.
    version: int = 0
    num_set_ups: int = 0
    made_after: int = 0  # so many calls of graphs, which cannot have read its parameters
    warned_of_eager: bool = False
    # Whether what torch.compile made of units in it was looked for, after it was sharded.
    knows_wrappers: bool = False
    # What the paths keep of the unit, each its own: graph.watch.Watch, and eager.running.Running.
    watch: Any = field(default=None, repr=False)
    running: Any = field(default=None, repr=False)
    # Of the outermost unit, what is known of how other ranks run the model: core.exchange.Others.
    others: Any = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Path and class of the modules, for messages."""
        return ", ".join(f"{plain_path(self.path_of(one))} ({original_class(one).__name__})" for one in self.modules)

    def path_of(self, module: nn.Module) -> str:
        """Where in the model one of the unit's modules is; "" for the model itself, and for what is not in it.

        One walk finds the paths of all units: profiles ask for each of them many times a step.
        """
        tops = self.root.modules
        if not any(_module_at(top, self.paths.get(module)) is module for top in tops):
            self.paths.pop(module, None)
            for found, path in paths_in(tops).items():
                unit = unit_of(found)
                if unit is not None:
                    unit.paths[found] = path
        return self.paths.get(module, "")

    @functools.cached_property
    def by_fqn(self) -> dict[str, ShardedParam]:
        """The parameters, all of which are there from when the unit is made."""
        return {param.fqn: param for param in self.params}

    @property
    def root(self) -> Unit:
        """The outermost unit around this one."""
        return self if self.outer is None else self.outer.root

    def around(self) -> list[Unit]:
        """The units around this one, innermost first."""
        return [] if self.outer is None else [self.outer, *self.outer.around()]

    def inside(self) -> list[Unit]:
        """This unit and those inside it, outermost first."""
        return list(dict.fromkeys(unit for module in self.modules for unit in units_in(module)))

    @property
    def regather(self) -> bool:
        """Whether backward gathers again what forward gathered."""
        asked = self.settings.reshard_after_forward
        return not self.is_root if asked is None else asked

    @property
    def computes_elsewhere(self) -> bool:
        """Whether shards are not where they are gathered, and are copied there and back."""
        return self.offload and self.mesh.device.type != "cpu"

    def give(self, fulls: tuple[torch.Tensor | None, ...] | None) -> None:
        """Have compiled reads take full parameters, or, with None, gather for themselves again."""
        for full in self.given or ():
            if full is not None:
                vars(full).pop("register_post_accumulate_grad_hook", None)  # which a graph may have left there: a cycle
        self.given = fulls
        for place, param in enumerate(self.params):
            param.put_beside("full", None if fulls is None else fulls[place])

    def mode_of(self, param: ShardedParam) -> Mode:
        """What compiled backwards do with the parameter's gradient."""
        return self.accumulation.mode_of(param.mesh.num_replicas > 1)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` was given to fully_shard in; None for other modules."""
    return module.__dict__.get(STATE)


def units_in(model: nn.Module) -> list[Unit]:
    """The units inside ``model``, itself included, outermost first."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Pass the model that fully_shard was applied to, not a {type(model).__name__}.")
    return list(dict.fromkeys(unit for module in model.modules() if (unit := unit_of(module)) is not None))


def paths_in(tops: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The path of each module below ``tops``; the first one of a module that has several."""
    paths: dict[nn.Module, str] = {}
    for top in tops:
        for path, module in top.named_modules():
            paths.setdefault(module, path)
    return paths


def _module_at(top: nn.Module, path: str | None) -> nn.Module | None:
    found: nn.Module | None = None if path is None else top
    for name in path.split(".") if path else ():
        found = None if found is None else found._modules.get(name)
    return found


def plain_path(path: str) -> str:
    """A module's path as a user knows it, for messages."""
    return _WRAPPED.sub("", path).lstrip(".") or "(root)"


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before fully_shard."""
    return getattr(type(module), "_fsdp_compile_original", type(module))
