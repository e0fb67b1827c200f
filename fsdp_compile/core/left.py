"""What still holds a parameter that is sharded by now: an optimizer gets the shard, a module is named in a warning.

    optimizer = AdamW(model.parameters())       has the parameters
    fully_shard(model)                          has shards in their places: so has the optimizer
    optimizer.step()

With FSDP1's ``use_orig_params=True``, parameters stay the same objects, and accelerate's ``prepare(model, optimizer)``
counts on it. FSDP2's are others, and such an optimizer would train nothing. Here a shard is a DTensor, and no other
object can become one.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from .._torch_compat import dynamo
from .param import STAMP, ShardedParam
from .unit import original_class

T = TypeVar("T")

# Parameters that were sharded. Most of them are gone by now.
_sharded: list[weakref.ref[nn.Parameter]] = []


def note_sharded(full: Iterable[nn.Parameter]) -> None:
    """Add full parameters that were sharded to those that the next ``settle`` looks for."""
    _sharded.extend(map(weakref.ref, full))


def hand_over() -> None:
    """Replace parameters that were sharded by their shards in every optimizer; warn where it has stepped with one."""
    left = _left()
    for optimizer in _all(Optimizer) if left else ():
        for group in optimizer.param_groups:
            for place, param in enumerate(group["params"]):
                sharded = left.get(id(param))
                if sharded is None:
                    continue
                if optimizer.state.get(param):
                    warnings.warn(
                        f"{sharded.fqn} was sharded when its {type(optimizer).__name__} had taken steps already, whose "
                        "state is of the whole parameter: it does not train the shard. Shard the model before the "
                        "first step, or build the optimizer anew.",
                        stacklevel=4,
                    )
                    continue
                group["params"][place] = sharded.shard


def settle() -> None:
    """Hand over before the first forward, and name modules that are not tied any more to those that were sharded."""
    left: dict[int, ShardedParam] = {}
    if _sharded and _left():
        gc.collect()  # a module that was replaced, as adapters do it, may be in a circle
        hand_over()
        left = _left()
    _sharded.clear()
    for module in _all(nn.Module) if left else ():
        for name, param in module._parameters.items():
            sharded = left.get(id(param))
            if sharded is not None:
                slot = sharded.slots[0]
                warnings.warn(
                    f"{slot.name} of a {original_class(slot.module).__name__} and {name} of a {type(module).__name__} "
                    "are not tied any more. fully_shard was called on the first and not on the second, which is still "
                    "the whole parameter, and which each rank trains alone. Call it on a module that contains both.",
                    stacklevel=4,
                )


def _left() -> dict[int, ShardedParam]:
    """Return the shards of the parameters that something still holds, by the parameters' ids."""
    full = [one() for one in _sharded]
    return {id(one): getattr(one, STAMP) for one in full if hasattr(one, STAMP)}


def _all(cls: type[T]) -> list[T]:
    """Return all objects of a class."""
    # ``isinstance`` would read ``__class__`` of each object, and a lazy proxy would load what it stands for.
    return [one for one in gc.get_objects() if issubclass(type(one), cls)]


dynamo.leave_all_to_python(settle)
