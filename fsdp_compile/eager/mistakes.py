"""Puts a parameter's name on an error of torch's that has none."""

from __future__ import annotations

import types

from torch.distributed.tensor import DTensor

from ..core.unit import Unit


def read_around(unit: Unit, error: BaseException) -> RuntimeError | None:
    """The error to raise instead, when a forward computed with a shard that it read around the parameter's attribute.

    DTensor refuses to mix with plain tensors and does not know which parameter it is; the frames of the traceback do.
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
