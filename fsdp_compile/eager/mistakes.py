"""Adds a parameter's name to an error of torch's that does not name it."""

from __future__ import annotations

import types

from torch.distributed.tensor import DTensor

from ..core.unit import Unit


def read_around(unit: Unit, error: BaseException) -> RuntimeError | None:
    """Return the error to raise instead, if a forward computed with a shard that it did not read by its attribute.

    DTensor refuses to mix with plain tensors and does not name the parameter; the traceback's frames hold it.
    """
    if not isinstance(error, RuntimeError) or "mixed torch.Tensor and DTensor" not in str(error):
        return None
    names = {id(shard): param.fqn for param in unit.params for shard in (param.param, param.shard)}
    traceback: types.TracebackType | None = error.__traceback__
    found = None
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, DTensor) and id(value) in names:
                found = names[id(value)]
        traceback = traceback.tb_next
    if found is None:
        return None
    return RuntimeError(
        f"{found} was read as a shard inside a forward: from where it was kept before the forward began, or in the "
        "forward of another unit. Read the attribute, or gather it with .full_tensor()."
    )
