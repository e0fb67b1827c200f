"""Find the storages behind the nodes of a graph, with their sizes: which nodes share memory.

    a   = relu(x)          a storage of its own
    v   = view(a)          a's storage
    b   = add_(a, 1)       a's storage, written to
    s   = split(a, 2)      a's storage, twice;  getitem(s, 1): a's storage
    w   = wait_tensor(g)   g's storage
    r   = reshape(t(a))    a storage of its own, if the reshape copies

Most of it is in the operators' schemas. For an operator without alias annotations the nodes' fake values tell: values
that share storage were made as views of one another. Whether a reshape copies is told by the values, or by strides.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch_compat as compat
from ..wire.collectives import is_wait
from ..wire.copies import is_on_host, wait_for_copies
from ..wire.ledger import begin
from .meta import TAKEN
from .nodes import VIEWS

HOST = "host"
# For a symbolic size that nobody has seen a value of. A constant, so that ranks agree.
DEFAULT_SIZE = 1024

aten = torch.ops.aten
_NO_KERNELS = (operator.getitem, wait_for_copies, begin)
_MAY_COPY = (aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints, aten.reshape_as.default)


@dataclass(frozen=True)
class Storage:
    """Memory that one node allocated, or that a placeholder brought."""

    node: fx.Node
    place: int  # among the node's results
    num_bytes: int
    device: str  # its type; HOST for what is copied to the host for a while, also if the host computes


Storages = dict[fx.Node, tuple[Storage, ...]]
NONE_GIVEN: Mapping[fx.Node, Sequence[Storage]] = {}


def storages_of(graph: fx.Graph, given: Mapping[fx.Node, Sequence[Storage]] = NONE_GIVEN) -> Storages:
    """Return the storages behind the tensors of each node's value, in their order; none for a value without tensors.

    Calls in ``given`` count as inputs, with these storages of another graph.
    """
    found: Storages = {}
    inputs: dict[object, Storage] = {}  # two inputs may share a storage
    for node in graph.nodes:
        tensors = tensors_of(node)
        if node.op == "output":
            found[node] = ()
        elif node.op != "call_function" or node in given:
            taken = _taken_from(given[node]) if node in given else node.meta.get(TAKEN, ())
            # The storage object of a value lives as long as the value does, which is as long as the node.
            known = taken or [(id(value.untyped_storage()), 0, allocated_bytes(value)) for value in tensors]
            found[node] = tuple(
                inputs.setdefault((name, of), dataclasses.replace(_new(node, place, value), num_bytes=num_bytes))
                for place, (value, (name, of, num_bytes)) in enumerate(zip(tensors, known, strict=True))
            )
        elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            found[node] = _element(node.args[0], node.args[1], found)
        elif is_wait(node):
            found[node] = found[node.args[0]]
        else:
            made: list[Storage] = []
            for place, value in enumerate(tensors):
                source = _source(node, place, value)
                shared = found[source][:1] if source is not None else ()
                made.extend(shared or (_new(node, place, value),))
            found[node] = tuple(made)
    return found


def note_taken(node: fx.Node, storages: Sequence[Storage]) -> None:
    """Note the memory that an input of backward keeps: a saved view keeps all of the tensor that it is a view of."""
    node.meta[TAKEN] = _taken_from(storages)


def name_in_forward(node: fx.Node) -> str:
    """Return the name of the node of forward that made an input of backward, if that is known, or else its own."""
    taken = node.meta.get(TAKEN)
    return taken[0][0] if taken else node.name


def _taken_from(storages: Iterable[Storage]) -> tuple[tuple[str, int, int], ...]:
    return tuple((one.node.name, one.place, one.num_bytes) for one in storages)


def _new(node: fx.Node, place: int, value: torch.Tensor) -> Storage:
    device = HOST if is_on_host(node) else value.device.type
    return Storage(node, place, allocated_bytes(value), device)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors of a node's value, as a flat list."""
    return list(_tensors_in(node.meta.get("val")))


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the inputs whose data a node may read, without the sizes among its arguments."""
    return [source for source in node.all_input_nodes if tensors_of(source)]


def is_free(node: fx.Node) -> bool:
    """Whether a node runs no kernel: an input or output, a view, an element of a tuple, a size, a wait."""
    if node.op != "call_function" or node.target in _NO_KERNELS or is_wait(node):
        return True
    tensors = tensors_of(node)
    if not tensors:  # a size, or an op that only writes to its inputs
        is_read = compat.has_tag(node.target, torch.Tag.data_dependent_output)
        return (_is_number(node.meta.get("val")) and not is_read) or not inputs_of(node)
    if any(_is_written(node, place) for place in range(len(tensors))):
        return False
    return all(_source(node, place, value) is not None for place, value in enumerate(tensors))


def is_view(node: fx.Node) -> bool:
    """Whether a node returns tensors and runs no kernel for them."""
    return node.op == "call_function" and is_free(node) and bool(tensors_of(node))


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that a node is a view of, or the node itself; a size is a view of nothing."""
    while is_view(node) and (sources := inputs_of(node)):
        node = sources[0]
    return node


def elements(value: torch.Tensor) -> int:
    """Count the elements of its storage that a tensor shows; an expanded dimension shows the same ones again."""
    if value.layout is not torch.strided:
        return _product(value.shape)
    return _product([size for size, stride in zip(value.shape, value.stride()) if hint(stride) != 0])


def tensor_bytes(value: torch.Tensor) -> int:
    """Return the bytes of memory that a kernel touches when it reads or writes all of a tensor."""
    return elements(value) * value.dtype.itemsize


def allocated_bytes(value: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last one."""
    sizes = [hint(size) for size in value.shape]
    if value.layout is not torch.strided or 0 in sizes:
        return _product(sizes) * value.dtype.itemsize
    last = sum((size - 1) * hint(stride) for size, stride in zip(sizes, value.stride()))
    return (last + 1) * value.dtype.itemsize


def hint(size: int | torch.SymInt) -> int:
    return compat.size_hint(size, DEFAULT_SIZE)


def _product(sizes: Iterable[int | torch.SymInt]) -> int:
    return math.prod(map(hint, sizes))


def _source(node: fx.Node, place: int, value: torch.Tensor) -> fx.Node | None:
    """Return the input that shares its memory with a node's result; None if the result has memory of its own."""
    aliased = compat.aliased_argument(node.target, place)
    if aliased is not None:
        source = compat.arguments_of(node).get(aliased[0])
        if not isinstance(source, fx.Node):
            return None
        copies = node.target in _MAY_COPY and not _shares(value, source) and not _stays_in_order(value, source)
        return None if copies else source
    if node.target in VIEWS and isinstance(node.args[0], fx.Node):
        return node.args[0]
    if compat.has_tag(node.target, torch.Tag.pointwise):
        return None
    return next((source for source in node.all_input_nodes if _shares(value, source)), None)


def _is_written(node: fx.Node, place: int) -> bool:
    aliased = compat.aliased_argument(node.target, place)
    return aliased is not None and aliased[1]


def _shares(value: torch.Tensor, source: fx.Node) -> bool:
    if value.layout is not torch.strided:
        return False
    same = value.untyped_storage()
    return any(one.layout is torch.strided and one.untyped_storage() is same for one in tensors_of(source))


def _stays_in_order(value: torch.Tensor, source: fx.Node) -> bool:
    """Whether a value and its source are both contiguous, so that a reshape need not have copied.

    This is for nodes that a pass put in another node's place: their values do not share storage with their sources.
    """
    for tensor in (value, *tensors_of(source)):
        expected = 1
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
            if hint(size) != 1 and hint(stride) != expected:
                return False
            expected *= hint(size)
    return True


def _element(source: fx.Node, index: Any, found: dict[fx.Node, tuple[Storage, ...]]) -> tuple[Storage, ...]:
    """Return the storages of one element of the results of ``source``."""
    values = source.meta.get("val")
    if isinstance(values, dict) and index in values:
        index, values = list(values).index(index), list(values.values())
    if not isinstance(values, (tuple, list)) or not isinstance(index, int):
        return found[source]
    counts = [len(list(_tensors_in(value))) for value in values]
    first = sum(counts[:index] if index >= 0 else counts[: len(counts) + index])
    # An operator that returns a list of views has one storage for all of them, by its schema.
    return found[source][first : first + counts[index]] if len(found[source]) == sum(counts) else found[source][:1]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):  # a user's Triton kernel returns a dict
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def _is_number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_number, value))
    return isinstance(value, (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool))
