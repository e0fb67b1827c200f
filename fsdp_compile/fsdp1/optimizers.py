"""Put the shards into optimizers that were built before their model was wrapped.

    optimizer = AdamW(model.parameters())       has the parameters
    model = FSDP(model, use_orig_params=True)   has shards in their places: so has the optimizer
    optimizer.step()

With ``use_orig_params=True``, FSDP1's parameters stay the same objects, and accelerate's ``prepare(model, optimizer)``
counts on it. Here a shard is a DTensor, and no other object can become one.
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
    """Replace parameters that were sharded by their shards in every optimizer; warn where it has stepped with one.

    ``before``: the parameters before wrapping. No optimizer has a parameter that is gone by now: most calls end early.
    """
    left: dict[int, ShardedParam] = {}
    for full in (one() for one in before):
        if hasattr(full, STAMP):
            left[id(full)] = getattr(full, STAMP)
    if not left:
        return
    # By type(): isinstance would also ask an object for the class that it claims to have, as a proxy does.
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
