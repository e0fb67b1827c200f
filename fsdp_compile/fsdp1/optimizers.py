"""Optimizers that were built before their model was wrapped train what it has now.

    optimizer = AdamW(model.parameters())       has the parameters
    model = FSDP(model, use_orig_params=True)   has shards in their places: so has the optimizer
    optimizer.step()

FSDP1 leaves ``use_orig_params=True``'s parameters the objects that they were, and accelerate's
``prepare(model, optimizer)`` counts on it. A shard is a DTensor, and no other object can become one.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from ..core.param import STAMP, ShardedParam


def hand_over(before: Iterable[weakref.ref[nn.Parameter]]) -> None:
    """Put shards where optimizers have what was sharded; warn of one that has taken steps with it.

    ``before``: the parameters as they were. What is gone by now, no optimizer has: most calls look no further.
    """
    left: dict[int, ShardedParam] = {}
    for full in (one() for one in before):
        if hasattr(full, STAMP):
            left[id(full)] = getattr(full, STAMP)
    if not left:
        return
    # By its type: what says of itself that it is of another class (a proxy) need not be asked.
    for optimizer in [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]:
        for group in optimizer.param_groups:
            for place, param in enumerate(group["params"]):
                sharded = left.get(id(param))
                if sharded is None:
                    continue
                if optimizer.state.get(param):
                    warnings.warn(
                        f"{sharded.fqn} was wrapped when its {type(optimizer).__name__} had taken steps already, whose "
                        "state is of the whole parameter: it does not train the shard. Wrap the model before the first "
                        "step, or build the optimizer anew.",
                        stacklevel=3,
                    )
                    continue
                group["params"][place] = sharded.shard
