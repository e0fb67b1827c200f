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
from collections.abc import Iterable

from torch.optim import Optimizer

from ..core.param import STAMP
from ..core.unit import Unit


def hand_over(units: Iterable[Unit]) -> None:
    """Put the shards of ``units`` where optimizers have what was sharded; warn of one that has taken steps with it."""
    ours = {id(param): param for unit in units for param in unit.params}
    # By its type: what says of itself that it is of another class (a proxy) need not be asked.
    for optimizer in [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]:
        for group in optimizer.param_groups:
            for place, param in enumerate(group["params"]):
                sharded = ours.get(id(getattr(param, STAMP, None)))
                if sharded is None or param is sharded.shard:
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
