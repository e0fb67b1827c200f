"""The property that reads a parameter: traced code and the eager path go different ways from here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..core.param import BY_MARKER as BY_MARKER  # for the generated code
from ..core.param import READS, Mark
from .reading import function_of
from .sink import Sink
from .watch import UnitWatch


def as_computed_with(param: Any, sink: Sink, watch: UnitWatch, fqn: str) -> Any:
    """Return what is registered in the shard's place and is no shard: None, or a full tensor.

    The user or ``torch.func.functional_call`` put it there, or ``full_params``, whose tensor is cast to the dtype that
    the unit computes in.
    """
    is_ours = isinstance(param, torch.Tensor) and sink.param.is_full and watch.gather(fqn) is None
    return param.to(watch.dtype(fqn)) if is_ours else param


# The eager path has ``eager_read``: (module, name, what is registered) -> what a read gives, or BY_MARKER; and
# ``eager_write``: (module, name, value) -> whether it took the value.
GETTER = """
def make(eager_read):
    def read(self):
        traced = torch.compiler.is_dynamo_compiling()
        how = {watch}.reads({fqn}, {name!r}) if traced else None
        if how is not None:
            return how(self)
        param = dict.get(self._parameters, {name!r}, MISSING)
        if param is MISSING:
            raise AttributeError({name!r})
        if not traced:
            full = eager_read(self, {name!r}, param)
            if full is not BY_MARKER:
                return full
        watch, fqn = {watch}, {fqn}
        if not {sink}.param.is_cut(param):
            return as_computed_with(param, {sink}, watch, fqn)
        return watch.reads_registered(fqn, {name!r}, traced)(self, param)
    return read
"""

MISSING = Mark()  # no such parameter: it was deleted after sharding


def getter(name: str, eager_read: Callable[..., Any], eager_write: Callable[..., bool]) -> property:
    """Return a property that reads parameter ``name`` of any module; the watch knows what differs between modules.

    Its code is generated, so that names in it are constants, which need no guards.
    """

    def write(self: Any, value: Any) -> None:
        # nn.Module registers parameters by itself: only other values come here, in place of a deleted parameter.
        if eager_write(self, name, value):
            return
        raise RuntimeError(
            f"{self.__dict__[READS][name][0].fqn} is sharded: it cannot become a {type(value).__name__} after "
            "fully_shard. Apply weight_norm, spectral_norm, pruning and the like before fully_shard."
        )

    return property(_made(name)(eager_read), write)


@functools.cache
def _made(name: str) -> Any:
    return function_of(GETTER, name, globals())
