"""The state of a step, as far as it runs eagerly. This is data; ``forward``, ``reads`` and ``backward`` change it.

    Running       a unit: what is gathered, which of its forwards run, which backward has reached it
    Use           one forward of a unit, or several with no other unit between: what reads see, and where backward is
    Recording     the reads of a use that autograd records, and their gradients until all are there
    Iteration     what the units under one root share: the order in which they ran, and what is in flight
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from .._torch_compat import autograd
from ..core.grads import LateHooks
from ..core.unit import Unit
from .gathered import Bucket, Gathered
from .reduction import Reduction, Traffic


@dataclass(eq=False)
class Running:
    """The state of one unit in a step."""

    unit: Unit
    gathered: Gathered | None = None
    uses: list[Use] = field(default_factory=list)  # forwards that are running, innermost last
    # The use that reads outside of a forward belong to, between unshard() and reshard().
    held_use: Use | None = None
    # The use that forwards of the unit share: consecutive ones, and those of its modules if it has several. Some of
    # these have yet to run in it.
    shared_use: Use | None = None
    not_run_yet: set[nn.Module] = field(default_factory=set)
    last_use: weakref.ref[Use] | None = None
    # The use whose backward is running: forwards that checkpointing recomputes use it. After a backward that
    # raised, its ``task`` is an old one, and the use is stale.
    backward_use: Use | None = None
    in_backward: set[Use] = field(default_factory=set)
    reduced_in: int | None = None
    awaited_in: int = -1  # number of the last forward that a backward of the unit may come from
    warned_of_view: bool = False
    own_iteration: Iteration = field(default_factory=lambda: Iteration())

    @property
    def iteration(self) -> Iteration:
        return running(self.unit.root).own_iteration

    @property
    def runs_forward(self) -> bool:
        """Whether a forward of this unit, or of one around it, is running."""
        return bool(self.uses) or any(running(unit).uses for unit in self.unit.around())

    def current(self) -> Gathered:
        """Return the unit's full parameters: a new object if its parameters or their settings changed."""
        if self.gathered is None or not self.gathered.serves(self.unit):
            if self.gathered is not None:
                self.gathered.free()
            self.gathered = Gathered(self.unit)
        return self.gathered

    def forget(self) -> None:
        """Reset the state to that at the beginning of a step."""
        self.uses.clear()
        self.held_use = self.shared_use = self.backward_use = self.reduced_in = None
        self.in_backward.clear()
        self.not_run_yet.clear()
        self.free()

    def free(self) -> None:
        """Free the full parameters that the eager path has gathered, and those that stay for graphs."""
        if self.gathered is not None:
            self.gathered.free()
        self.unit.keeper.free()


def is_here(unit: Unit) -> bool:
    """Whether a forward of the unit gathers nothing: it is gathered, or full parameters are in its shards' places."""
    gathered = running(unit).gathered
    return (gathered is not None and gathered.is_full) or all(one.param is not one.shard for one in unit.params)


def running(unit: Unit) -> Running:
    """Return the state of the unit in a step."""
    if unit.running is None:
        unit.running = Running(unit)
    known: Running = unit.running
    return known


class Use:
    """One forward of a unit, and those that follow it with no other unit between: a use, for the schedule."""

    def __init__(self, run: Running, gathered: Gathered) -> None:
        self.run = run
        self.gathered = gathered
        # The unit's use before this one, whose backward comes later.
        self.before, run.last_use = run.last_use, weakref.ref(self)
        self.reached: set[int] = set()  # the parameters in the buckets that it gathered
        self.place = 0  # among the uses that await backward
        self.forward_number = run.iteration.forward_number
        self.task: int | None = None  # number of the backward that reached the outputs
        self.left_in: int | None = None  # number of the backward that finished with it
        self.is_in_backward = False  # reentrant checkpointing made it while a backward runs
        # False if code that is not ours calls the forward: we are not told when that forward raises.
        self.ends_with_errors = True
        # An autograd node at the inputs tells when backward is through with the unit.
        self.ends_at_inputs = False
        self.records = False  # whether a forward ran with grad enabled
        self.was_read = False
        self.has_outputs = False  # that a gradient may come to
        self.is_transformed = False  # a forward ran in a transform of torch.func
        self.region = 0  # number of the checkpointed region around the last forward
        self.looks_up_again = False  # in a checkpointed region, which backward runs once more
        self.read_frozen = False  # autograd may have saved one, and no gradient is sure to come for it
        # What reads return, by index and whether autograd recorded them. Autograd's nodes refer to the use, so they
        # are kept only while a forward runs.
        self.tensors: dict[tuple[int, bool], Any] = {}
        self._read_of: dict[int, Any] = {}  # the full parameters that these were made of, by index
        # The recorded ones, as long as somebody holds them: a forward that backward recomputes reads the same tensors.
        self.given: dict[int, TensorWeakRef] = {}
        # Weak: if garbage collection decided which uses await backward, ranks would differ.
        self.recording: weakref.ref[Recording] | None = None

    @property
    def unit(self) -> Unit:
        return self.run.unit

    @property
    def is_last_in_backward(self) -> bool:
        """Whether no use of the unit before this one, in the same forward of the root, awaits its backward."""
        before = None if self.before is None else self.before()
        return before is None or before.left_in is not None or before.forward_number != self.forward_number

    def again(self) -> list[Bucket]:
        """Return the buckets that backward needs gathered: of what the forward gathered, but for tables.

        Autograd saves the numbers of a table's rows, unless checkpointing looks them up once more.
        """
        return self.gathered.gathered_again(self.reached - (set() if self.looks_up_again else self.gathered.tables))

    def has_read(self, index: int, recorded: bool, full: Any) -> bool:
        """Return whether ``tensors`` has what a read of this full parameter gives.

        If the parameter was gathered anew since it was read, what the reads gave is dropped.
        """
        if self._read_of.get(index) is not full:
            self._read_of[index] = full
            for one in (True, False):
                self.tensors.pop((index, one), None)
        return (index, recorded) in self.tensors

    def forget_reads(self) -> None:
        """Drop the tensors that reads returned; whoever needs one holds it."""
        self.tensors.clear()
        self._read_of.clear()
        self.recording = None  # what is recomputed for backward may never get gradients


class Recording:
    """The parameters that a forward read while autograd recorded, and their gradients until all are there."""

    def __init__(self, use: Use) -> None:
        self.use = use
        self.read: set[int] = set()
        self.arrived: set[int] = set()
        self.grads: dict[int, Tensor] = {}
        self.delivered: set[int] = set()  # reduced already, or returned to autograd
        self.reduction: Reduction | None = None  # of its buckets that are complete, until all of them are
        self._num_reduced = 0  # how many of its buckets that is

    def take_next(self) -> frozenset[int] | None:
        """Return the next bucket to reduce, if its gradients are all there; each bucket once."""
        buckets = self.use.gathered.reduced_together(self.read)
        if self._num_reduced == len(buckets) or not buckets[self._num_reduced] <= self.arrived:
            return None
        self._num_reduced += 1
        return buckets[self._num_reduced - 1]

    def forget(self) -> None:
        """Reset to the state before a backward."""
        self.arrived, self.grads, self.delivered = set(), {}, set()
        self.reduction, self._num_reduced = None, 0


@dataclass(eq=False)
class Visit:
    """Buckets of one unit that a forward gathers one after another, with no bucket of another unit between them."""

    run: Running
    gathered: weakref.ref[Gathered]
    buckets: list[Bucket]


class Iteration:
    """What the units under one root share in a forward and backward, as far as these run eagerly."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.is_last_backward = True
        self.manual_finalization = False
        # Forward: what the last one gathered, in its order, and what the running one has gathered.
        self._last_forward: list[Visit] = []
        self._this_forward: list[Visit] = []
        self._ended: list[Use] = []  # forwards of these have ended; their next ones may come without gathering
        self.depth = 0  # unit forwards that run, outside of backward
        self.forward_number = 0  # counts forwards of the root
        self.has_run = False  # the root's forward, eagerly
        # Backward: uses in the order in which their forwards ended.
        self._uses: list[weakref.ref[Use]] = []
        # Running backwards, a nested one after the one around it; each with autograd's callback for its end.
        self.tasks: dict[int | None, weakref.ref[Any]] = {}
        self.max_reductions = 1  # that may be in flight in the running backward
        # The running backward will itself be differentiated: what it read will be read again.
        self.creates_graph = False
        self.touched: dict[Running, None] = {}
        # Reads that have some of their gradients, and the backward in which the first one came.
        self.incomplete: dict[Recording, int | None] = {}
        self.hooks = LateHooks()
        # An asynchronous finalization that nobody has waited for yet.
        self.pending_handle: object | None = None

    def adopt(self, inner: Iteration) -> None:
        """Keep settings that were made on a module while it was the outermost one."""
        self.is_last_backward &= inner.is_last_backward
        self.manual_finalization |= inner.manual_finalization
        self.traffic = inner.traffic

    def come_to(self, use: Use, buckets: Sequence[Bucket]) -> list[Visit]:
        """Note that a forward needs these buckets now; return what comes with them and after them, as the last time."""
        run, last, this = use.run, self._last_forward, self._this_forward
        self.touched.setdefault(run)
        self.end_uses()
        if use.unit.comes_in_parts and this and this[-1].run is run:
            this[-1].buckets += buckets
            return []
        place = len(this)
        this.append(Visit(run, weakref.ref(use.gathered), [*buckets]))
        return last[place : place + 2] if place < len(last) and last[place].run is run else []

    def has_ended(self, use: Use) -> None:
        """Note that a forward of the use has ended. If the unit's next one comes at once, it is of the same use."""
        self._ended.append(use)

    def goes_on(self, use: Use) -> None:
        """Note that a forward goes on with a use. If it comes at once, the uses of units inside may go on as well."""
        if use in self._ended:
            self._ended.remove(use)
        elif use not in use.run.uses:  # of another module of the unit: those of other units have run since
            self.end_uses()

    def end_uses(self) -> None:
        """Free or keep the parameters of uses whose forwards have ended."""
        ended, self._ended = self._ended, []
        for use in ended:
            self._end(use)

    def _end(self, use: Use) -> None:
        run, unit = use.run, use.unit
        if run.shared_use is use:
            run.shared_use, run.not_run_yet = None, set()
        use.forget_reads()
        if use.has_outputs and use.was_read:
            self._awaits_backward(use)
        if use.has_outputs or use.is_transformed:
            run.awaited_in = self.forward_number
        if run.uses or not use.gathered.is_here or use.is_transformed:
            return  # a transform may run a backward that is not seen here: the next forward frees
        run.held_use = None
        if use.has_outputs and unit.post_forward is not None:
            use.gathered.free_but_a_slice()
        elif unit.regather:
            use.gathered.free()

    def end_forward(self) -> None:
        """End the outermost forward and its unfinished uses, and free the parameters that no backward awaits."""
        self._last_forward, self._this_forward = self._this_forward, []
        runs = list(dict.fromkeys(visit.run for visit in self._last_forward))
        for run in runs:
            if run.shared_use is not None and run.shared_use not in self._ended:
                self._ended.append(run.shared_use)
        self.end_uses()
        for run in runs:
            if run.gathered is not None and run.awaited_in != self.forward_number and not run.uses:
                run.gathered.free()
        self._uses = [reference for reference in self._uses if reference() is not None]
        for place, reference in enumerate(self._uses):
            if (use := reference()) is not None:
                use.place = place

    def abandon_forward(self) -> None:
        self._this_forward, self._ended = [], []

    def _awaits_backward(self, use: Use) -> None:
        use.place = len(self._uses)
        self._uses.append(weakref.ref(use))

    def come_after(self, use: Use) -> Iterator[Use]:
        """Yield the use whose backward comes next after that of ``use``, of the same root forward.

        In a checkpointed region, which runs once more before its backward, all uses of the region come next, and
        then one before it. Uses that another forward left behind may exist on one rank and be gone on the next.
        """
        for place in range(use.place - 1, -1, -1):
            earlier = self._uses[place]()
            if earlier is not None and earlier.forward_number != use.forward_number:
                break
            if earlier is not None:
                yield earlier
                if not use.region or earlier.region != use.region:
                    break

    def awaits_others(self, use: Use) -> bool:
        """Whether other uses of the same unit await their backward, which may be this one or a later one."""
        known = (reference() for reference in self._uses)
        others = (one for one in known if one is not None and one is not use and one.run is use.run)
        return any(one.left_in is None for one in others)

    def forget_raised(self) -> None:
        """Forget nested backwards that raised: autograd has dropped the callbacks for their ends."""
        self.tasks = {task: end for task, end in self.tasks.items() if end() is not None}

    def in_stale_backward(self) -> bool:
        """Whether a backward began that neither ended nor runs: it raised."""
        raised = all(end() is None for end in self.tasks.values())
        return bool(self.tasks) and (raised or autograd.backward_task() is None)


def recover(root: Unit) -> None:
    """Reset every unit to the beginning of a step, after a forward or a backward that raised.

    Gradients that earlier backwards held back stay.
    """
    iteration = running(root).own_iteration
    units = root.inside()
    iteration.traffic.forget(units)
    iteration.abandon_forward()
    iteration.tasks.clear()
    for recording in iteration.incomplete:
        recording.forget()
    iteration.incomplete.clear()
    iteration.depth, iteration.creates_graph = 0, False
    iteration.pending_handle = None
    kept: list[str] = []
    lost: list[str] = []
    for unit in units:
        for names, fqns in zip((kept, lost), unit.accumulation.held.undo_backward()):
            names += [f"{unit.name}: {fqn}" for fqn in sorted(fqns)]
        running(unit).forget()
    iteration.touched.clear()
    iteration.hooks.release()
    for names, what in ((kept, "kept and have its part"), (lost, "lost")):
        if names:
            warnings.warn(
                f"A backward raised after it had added to gradients that no_sync held. These are {what}: "
                f"{', '.join(names)}. To begin anew, call model.reset_iter_state() on every rank, which drops all "
                "gradients.",
                stacklevel=2,
            )
