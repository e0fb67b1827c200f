"""Parameters with an all-gather extension on the eager path: what they send, and what is made of what arrives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import dtensors, subclasses
from ..core.extension import releases_what_arrived, without_padding
from ..core.param import ShardedParam
from ..core.spec import protocol_of
from ..core.unit import Unit
from ..passes import ParamSpec
from ..passes.wire import lower
from .collectives import Caller
from .memory import Memory


class Extension:
    """The gathers of one such parameter on the eager path, and the tensors made from them.

        ask       the subclass says what to send
        launch    it is sent; what is gathered lands in the storages of the first gather
        land      first:  full, inner = post(gathered)
                  later:  post(gathered, out=full), which may rely on where ``gathered`` lies
        free      the storages of what was gathered, and of the inner tensors, shrink to nothing
    """

    def __init__(self, unit: Unit, param: ShardedParam, shard: DTensor, spec: ParamSpec) -> None:
        self._unit, self._shard, self._spec, self._device = unit, shard, spec, unit.mesh.device
        self._protocol = protocol_of(param, shard, unit.mp_policy)
        self._releases = releases_what_arrived(shard)
        self._sent: list[tuple[Tensor, ParamSpec]] = []
        self._in_flight: list[tuple[Any, ParamSpec, Caller]] = []
        self._metadata: Any = None
        self._kept: list[Tensor] = []  # what was gathered, as it was sent
        self._inner: list[Tensor] = []
        self._full: Tensor | None = None
        self._memory: list[Memory] = []  # of what was gathered, and of the inner tensors

    def ask(self) -> None:
        """Ask the subclass what to send."""
        local = dtensors.local_tensor(self._shard)
        if local.device != self._device:  # an offloaded shard: what is sent must be where the process group is
            local = local.to(self._device, non_blocking=True)
        sent, specs, self._metadata = self._protocol.before(local, self._spec)
        self._sent = list(zip(sent, specs))

    def launch(self) -> None:
        """Start the all-gathers."""
        sent, self._sent = self._sent, []
        specs = [spec for _, spec in sent]
        if [(one.shape, one.dtype) for one in self._kept] != [(torch.Size(one.size), one.dtype) for one in specs]:
            self.forget()
        for memory in self._memory:
            memory.take()
        for index, (tensor, spec) in enumerate(sent):
            lands_there = self._kept and type(tensor) is Tensor and spec.dim == 0 and spec.num_shards > 1
            call = Caller(self._unit, [self._kept[index].data] if lands_there else ())
            self._in_flight.append((lower.launch_gather(call, [tensor], [spec]), spec, call))

    def land(self) -> Tensor:
        """Wait for the all-gathers, and return the full parameter that the subclass makes of what they gathered."""
        arrived = [lower.finish_gather(call, launched, [spec])[0] for launched, spec, call in self._in_flight]
        self._in_flight = []
        local, is_first = dtensors.local_tensor(self._shard), not self._kept
        if is_first:
            # With one rank what arrives is what was sent, which may be the shard itself.
            self._kept = [one.clone() for one in arrived] if self._spec.num_shards == 1 else arrived
            self._memory = [Memory(*self._kept)]
        for kept, tensor in zip(self._kept, arrived):
            if not subclasses.share_storage(tensor, kept):
                kept.data.copy_(tensor)
        if self._full is None:
            made, inner = self._protocol.after(local, self._kept, self._metadata, self._spec)
            self._inner, self._full = [*inner], without_padding(made, self._spec)
            self._memory = [self._memory[0], Memory(*inner)]
        else:
            self._protocol.again(local, self._kept, self._metadata, self._spec, self._full, self._inner)
        if self._releases:
            self._memory[0].give_back()
        return self._full

    def drop(self) -> None:
        """Wait for the all-gathers in flight, and discard what they gathered."""
        in_flight, self._in_flight, self._sent = self._in_flight, [], []
        for launched, spec, call in in_flight:
            lower.finish_gather(call, launched, [spec])

    def free(self) -> None:
        """Free the storages."""
        for memory in self._memory:
            memory.give_back()

    def forget(self) -> None:
        """Leave the storages to whoever still holds them; the next gather counts as the first one."""
        self._kept, self._inner, self._full, self._memory = [], [], None, []

    def addresses(self) -> set[int]:
        """Return the addresses of the full parameter's storages; a subclass has only those of its inner tensors."""
        tensors = [one for one in (self._full, *self._kept, *self._inner) if one is not None]
        return subclasses.addresses_in(*tensors)
