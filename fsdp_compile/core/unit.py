"""Unit: the data of one call of fully_shard or replicate, which both paths use.

    graph/    asks for ``mode_of`` and ``spec_of`` (core/spec.py), puts markers into graphs, and keeps a ``watch``
    eager/    runs the same lowering programs over the same specs, and keeps its state in ``running``
    api/      makes units, changes their settings, and generates the classes that send reads to the two paths
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._torch_compat import dtensors, subclasses
from ..passes.ir.module_paths import plain_name
from ..passes.wire.kept import Keeper, Look
from ..passes.wire.ledger import ledger
from .accumulation import Accumulation, Mode
from .mesh import ShardMesh
from .param import ShardedParam
from .settings import Settings

# What FSDP1's wrappers add to paths (fsdp1/region.py). Names that users see leave it out.
WRAPPED = "_fsdp_wrapped_module"

STATE = "_fsdp_compile_state"  # the attribute of a module that holds its unit
INSIDE = "_fsdp_compile_inside"  # a method of generated classes: the forward inside a graph that the eager path feeds


@dataclass(frozen=True)
class Ends:
    """How the eager path ends a backward: functions that graph/ calls but does not import, for gradients that wait."""

    at_end: Callable[[Unit], None]  # when the backward that runs ends, reduce the gradients that wait, and free
    now: Callable[[Unit], None]  # reduce the gradients that wait: compiled autograd does not tell when it ends
    note_reduction: Callable[[Unit], None]  # note that this backward reduces gradients of the unit


@dataclass(eq=False)
class Unit:
    """Modules, their parameters, and everything that decides how these are gathered and reduced."""

    modules: tuple[nn.Module, ...]
    label: str  # class name of the module, or of each module, joined by "+"
    mesh: ShardMesh
    mp_policy: MixedPrecisionPolicy
    mixin: type  # a base of the classes that are generated for the modules
    ends: Ends
    params: list[ShardedParam] = field(default_factory=list)
    overrides: dict[str, torch.dtype] = field(default_factory=dict)  # by FQN, from param_dtype_override_fn
    offload: bool = False  # shards and their gradients stay on the CPU
    pins: bool = False  # these shards are in pinned memory, if there is an accelerator
    # After forward each rank keeps a slice for these few ranks, and backward gathers over them alone.
    post_forward: ShardMesh | None = None
    # The ranks for which slices are kept if the plan of a step says so: those of a node, with a byte budget.
    may_slice: ShardMesh | None = None
    settings: Settings = field(default_factory=Settings)
    accumulation: Accumulation = field(default_factory=Accumulation)
    # The unit around this one, and whether there are units with parameters inside it.
    outer: Unit | None = None
    has_inner: bool = False
    takes_inputs_to: torch.device | None = field(init=False)  # set by ``put_inside``
    eager_only: str | None = None  # the name of a setting or an extension that a graph cannot honour
    # Whether graphs can take its full parameters. What an all-gather extension makes is made inside the graph.
    gives_to_graphs: bool = True
    # The full parameters, in the order of ``params``, that an eager call gives to the graph inside it, if there is one.
    given: tuple[torch.Tensor | None, ...] | None = field(default=None, repr=False)
    # Paths of its modules in the model, as ``path_of`` last found them.
    paths: dict[nn.Module, str] = field(default_factory=dict, repr=False)
    # ``version`` counts changes of the specs or the shards, ``num_set_ups`` those of more than single shards.
    version: int = 0
    num_set_ups: int = 0
    # Number of graph calls before it was made: those cannot have read its parameters.
    made_after: int = field(default_factory=lambda: ledger.num_begun)
    warned_of_eager: bool = False
    # Whether wrappers by torch.compile of the units inside were looked for, after it was sharded.
    knows_wrappers: bool = False
    keeper: Keeper = field(init=False, repr=False)  # of what graphs gathered
    # The state that each path keeps of the unit: graph.watch.UnitWatch, and eager.running.Running.
    watch: Any = field(default=None, repr=False)
    running: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.put_inside(self.outer)
        me = weakref.ref(self)
        self.keeper = Keeper(lambda: _keeps(me()), lambda: _look(me()))

    def put_inside(self, outer: Unit | None) -> None:
        """Note the unit around this one. Only the outermost unit moves inputs, to an accelerator."""
        self.outer = outer
        moves = outer is None and self.mesh.device.type != "cpu"
        self.takes_inputs_to = self.mesh.device if moves else None

    @property
    def is_root(self) -> bool:
        return self.outer is None

    @property
    def name(self) -> str:
        """Path and class of the modules, for messages."""
        return ", ".join(f"{plain_path(self.path_of(one))} ({original_class(one).__name__})" for one in self.modules)

    def path_of(self, module: nn.Module) -> str:
        """Return the path in the model of one of the unit's modules; "" for the model itself, and for one outside it.

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
        """The parameters by FQN. None is added after the unit is made."""
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
    def comes_in_parts(self) -> bool:
        """Whether forward gathers each bucket where it is read: a model's root has some before the units inside it.

        Other units are gathered where their forward begins, with what is read behind units inside them. Units without
        parameters do not count.
        """
        return self.has_inner and not any(unit.params for unit in self.around())

    @property
    def regather(self) -> bool:
        """Whether backward gathers again what forward gathered."""
        asked = self.settings.reshard_after_forward
        return not self.settings.gathers_once and (not self.is_root if asked is None else asked)

    @property
    def keeps(self) -> bool:
        """Whether a backward that ends now leaves the parameters gathered for the next forward."""
        settings = self.settings
        return not settings.reshard_after_backward or (settings.gathers_once and not self.accumulation.sync)

    @property
    def unheeded_in_graphs(self) -> tuple[str, ...]:
        """Names of the settings that graphs ignore."""
        settings, unheeded = self.settings, self.settings.unheeded_in_graphs
        apart = any(param.apart is not None for param in self.params)
        if self.post_forward is not None or apart or self.computes_elsewhere:
            # Slices, what an all-gather extension makes, and what is gathered of offloaded shards do not stay.
            unheeded += ("set_reshard_after_backward",) * (not settings.reshard_after_backward)
            unheeded += ("configure(gather='once a step')",) * settings.gathers_once
        return unheeded

    @property
    def computes_elsewhere(self) -> bool:
        """Whether shards are on the CPU and gathered elsewhere: they are copied there, and gradients back."""
        return self.offload and self.mesh.device.type != "cpu"

    def give(self, fulls: tuple[torch.Tensor | None, ...] | None) -> None:
        """Have compiled reads take these full parameters; with None, have them gather for themselves again."""
        for full in self.given or ():
            if full is not None:
                vars(full).pop("register_post_accumulate_grad_hook", None)  # a graph may have set it: a cycle
        self.given = fulls
        for place, param in enumerate(self.params):
            param.put_beside("full", None if fulls is None else fulls[place])

    def mode_of(self, param: ShardedParam) -> Mode:
        """Return what compiled backwards do with the parameter's gradient."""
        return self.accumulation.mode_of(param.mesh.num_replicas > 1)


def _look(unit: Unit | None) -> Look:
    """Return where a unit's shards are, how often each was written to, and how often the unit was set up."""
    if unit is None:
        return []
    shards: list[Any] = [param.shard for param in unit.params if param.address is not None]
    return [(dtensors.local_tensor(one).data_ptr(), unit.version, *dtensors.versions_of(one)) for one in shards]


def _keeps(unit: Unit | None) -> bool:
    """Whether what a forward gathers now is to stay. If backward decides on the sync, its end frees it."""
    if unit is None:
        return False
    return unit.keeps or (unit.settings.gathers_once and unit.accumulation.decides_in_backward)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` was given to fully_shard in; None for other modules."""
    return module.__dict__.get(STATE)


def units_in(model: nn.Module) -> list[Unit]:
    """The units inside ``model``, itself included, outermost first."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"Pass the model that fully_shard was applied to, not a {type(model).__name__}.")
    return list(dict.fromkeys(unit for module in model.modules() if (unit := unit_of(module)) is not None))


def paths_in(tops: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return the path of each module below ``tops``; the first one of a module that has several."""
    paths: dict[nn.Module, str] = {}
    for top in tops:
        for path, module in top.named_modules():
            paths.setdefault(module, path)
    return paths


def names_in(unit: Unit, paths: Mapping[nn.Module, str]) -> dict[str, str]:
    """Return the names in the model of a unit's parameters, by FQN, if ``paths`` has their modules."""
    names = {}
    for param in unit.params:
        slot = next((slot for slot in param.slots if slot.module in paths), None)
        if slot is not None:
            names[param.fqn] = plain_name(f"{paths[slot.module]}.{slot.name}").lstrip(".")
    return names


def _module_at(top: nn.Module, path: str | None) -> nn.Module | None:
    found: nn.Module | None = None if path is None else top
    for name in path.split(".") if path else ():
        found = None if found is None else found._modules.get(name)
    return found


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, and the buffers that are saved, by all their names, which leave out wrappers.

    The tensors are the registered ones. A state dict of FSDP1's class would have copies of them.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *subclasses.saved_buffers(module).items()):
            if tensor is not None:
                found[plain_name(f"{path}.{name}" if path else name)] = tensor
    return found


def plain_path(path: str) -> str:
    """A module's path as a user knows it, for messages."""
    return plain_name(path) or "(root)"


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before fully_shard."""
    return getattr(type(module), "_fsdp_compile_original", type(module))
