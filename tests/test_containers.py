"""Inputs in containers of every kind are cast, and keep their types; nothing of theirs is made anew."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.core.containers import cast_floating, move, tensors_in
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fake_group_of_four")

BF16 = torch.bfloat16
POLICY = MixedPrecisionPolicy(param_dtype=BF16)


class Pair(NamedTuple):
    first: Tensor
    second: int


class Words(collections.UserDict):  # type: ignore[type-arg]
    def __init__(self, data: Any, language: str) -> None:
        super().__init__(data)
        self.language = language


class Triple(tuple):  # type: ignore[type-arg]
    pass


class Bag(dict):  # type: ignore[type-arg]
    def __init__(self, kind: str, values: Any) -> None:
        super().__init__(values)
        self.kind = kind


class Listed(list):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass
class Once:
    x: Tensor
    times: int = 0

    def __post_init__(self) -> None:
        self.times += 1
        self.beside = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    double: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", 2 * self.x)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Tensor
    name: str = "s"


def _default(x: Tensor) -> Any:
    box: Any = collections.defaultdict(int)
    box["x"] = x
    return box


# How to make one of a tensor, how to get the tensor out again, and what else must be as it was.
Kind = tuple[Any, Any, Any]
KINDS: dict[str, Kind] = {
    "list": (lambda x: [x, 1], lambda box: box[0], lambda box: box[1]),
    "tuple": (lambda x: (x, 1), lambda box: box[0], lambda box: box[1]),
    "dict": (lambda x: {"x": x}, lambda box: box["x"], len),
    "namedtuple": (lambda x: Pair(x, 3), lambda box: box.first, lambda box: box.second),
    "set": (lambda x: {x}, lambda box: next(iter(box)), len),
    "frozenset": (lambda x: frozenset([x]), lambda box: next(iter(box)), len),
    "OrderedDict": (lambda x: collections.OrderedDict(y=1, x=x), lambda box: box["x"], lambda box: list(box)),
    "defaultdict": (_default, lambda box: box["x"], lambda box: box.default_factory),
    "UserDict": (lambda x: Words({"x": x}, "en"), lambda box: box["x"], lambda box: box.language),
    "dataclass": (lambda x: Once(x), lambda box: box.x, lambda box: (box.times, box.beside)),
    "frozen dataclass": (lambda x: Frozen(x), lambda box: box.double / 2, lambda box: box.double.dtype == box.x.dtype),
    "dataclass with slots": (lambda x: Slotted(x), lambda box: box.x, lambda box: box.name),
    "subclass of tuple": (lambda x: Triple([x, 2, 3]), lambda box: box[0], len),
    "subclass of list": (lambda x: Listed([x, 2]), lambda box: box[0], len),
    "subclass of dict": (lambda x: Bag("b", {"x": x}), lambda box: box["x"], lambda box: box.kind),
    "PackedSequence": (
        lambda x: pack_sequence([x, x[:1]]), lambda box: box.data, lambda box: (box.batch_sizes.dtype, box.sorted_indices)),
    "nested": (lambda x: Once({"a": [(x,)]}), lambda box: box.x["a"][0][0], lambda box: box.times),  # type: ignore[arg-type]
}  # fmt: skip
# Those that Dynamo of some version does not let into a graph, whoever makes them.
NOT_TRACED = {"set", "frozenset", "subclass of tuple", "subclass of list", "subclass of dict", "PackedSequence"}


class Reader(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, box: Any, also: Any = None) -> Any:
        x = KINDS[self.kind][1](box)
        y = KINDS[self.kind][1](also)
        return self.linear(x) + y, box


def assert_is_cast(box: Any, given: Any, kind: str) -> None:
    _, get, rest = KINDS[kind]
    assert get(box).dtype == BF16 and type(box) is type(given), kind
    assert rest(box) == rest(given), kind
    assert get(given).dtype == torch.float32, f"{kind}: the caller's own was written to"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_a_container_is_cast(kind: str) -> None:
    """By position and by keyword."""
    make, _, _ = KINDS[kind]
    model = fully_shard(Reader(kind), mp_policy=POLICY)
    given = make(torch.ones(2, 4))
    output, box = model(given, also=make(torch.ones(2, 4)))
    assert output.dtype == BF16
    assert_is_cast(box, given, kind)
    output.sum().backward()
    assert model.linear.weight.grad is not None  # type: ignore[union-attr]


class ReadsAll(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds, self.linear = kinds, nn.Linear(4, 4)

    def forward(self, *boxes: Any) -> Any:
        return self.linear(sum(KINDS[kind][1](box) for kind, box in zip(self.kinds, boxes))), boxes


def test_what_is_in_containers_is_cast_in_one_graph() -> None:
    kinds = [kind for kind in KINDS if kind not in NOT_TRACED]
    model, given = fully_shard(ReadsAll(kinds), mp_policy=POLICY), [KINDS[kind][0](torch.ones(2, 4)) for kind in kinds]
    output, boxes = compiled(model, "aot_eager")(*given)
    assert output.dtype == BF16
    for one in zip(boxes, given, kinds, strict=True):
        assert_is_cast(*one)


def test_a_mapping_that_cannot_be_written_to_comes_as_it_is() -> None:
    model = fully_shard(Reader("dict"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    box = types.MappingProxyType({"x": torch.ones(2, 4)})
    assert model(box, also=box)[1] is box


def test_what_transformers_hands_around_is_cast() -> None:
    transformers = pytest.importorskip("transformers")

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, encoding: Any, output: Any) -> Any:
            return self.linear(encoding["x"] + output.last_hidden_state), output

    model = fully_shard(Reads(), mp_policy=POLICY)
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(2, 4))
    encoding = transformers.BatchEncoding({"x": torch.ones(2, 4), "ids": torch.ones(2, dtype=torch.long)})
    y, back = compiled(model, "aot_eager")(encoding, output)
    assert y.dtype == BF16 and back.last_hidden_state.dtype == BF16 and back["last_hidden_state"].dtype == BF16
    assert type(back) is type(output) and encoding["x"].dtype == torch.float32


def test_packed_rows_keep_their_places() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(5, 2)], enforce_sorted=False)
    cast: PackedSequence = cast_floating(packed, BF16)
    assert cast.data.dtype == BF16 and cast.sorted_indices is packed.sorted_indices
    assert [*map(id, tensors_in(packed))] == [*map(id, (packed.data, packed.sorted_indices, packed.unsorted_indices))]
    moved: PackedSequence = move(packed, torch.device("meta"))
    assert moved.data.is_meta and moved.sorted_indices.is_meta and moved.unsorted_indices.is_meta
    assert moved.batch_sizes is packed.batch_sizes, "which torch has on the CPU"


class Behind(collections.abc.MutableMapping):  # type: ignore[type-arg]
    """Keeps its items in a dict, which a shallow copy shares."""

    def __init__(self, items: Any) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self.items_[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.items_[key]

    def __iter__(self) -> Any:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def test_a_callers_mapping_is_left_alone() -> None:
    mine = Behind({"x": torch.ones(2), "note": [1]})
    cast = cast_floating(mine, BF16)
    assert type(cast) is Behind and cast["x"].dtype is BF16 and cast["note"] is mine["note"]
    assert mine["x"].dtype is torch.float32


def test_a_tuple_keeps_its_type_and_what_is_noted_on_it() -> None:
    cast = cast_floating(torch.ones(2, 3).max(dim=1), BF16)
    assert type(cast) is torch.return_types.max
    assert cast.values.dtype is BF16 and cast.indices.dtype is torch.long
    triple = Triple((torch.ones(2), 1))
    triple.note = "kept"  # type: ignore[attr-defined]
    assert cast_floating(triple, BF16).note == "kept"


@pytest.mark.parametrize("kind", [list, tuple, dict, set, Listed, Words, Bag, Once, PackedSequence])
def test_what_holds_nothing_new_is_the_same_object(kind: Any) -> None:
    """A model may write to it for its caller."""
    x = torch.ones(2)
    made = {
        dict: {"x": x}, Words: Words({"x": x}, "en"), Bag: Bag("b", {"x": x}), Once: Once(x), set: {x}, tuple: (x, 3),
        PackedSequence: pack_sequence([torch.ones(3, 2)]),
    }.get(kind, kind([x]) if kind in (list, Listed) else None)  # fmt: skip
    assert made is not None
    around = {"inner": [made, "else"]}
    assert cast_floating(around, torch.float32) is around and move(around, x.device) is around
    cast = cast_floating(around, BF16)
    assert cast is not around and cast["inner"][0] is not made and cast["inner"][1] == "else"


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.up.requires_grad_(False)

    def forward(self, x: Tensor, seen: dict[str, Any]) -> Tensor:
        seen["total"] = seen["total"] + x.detach().sum()
        return self.down(self.up(x))


def test_a_partly_frozen_unit_writes_to_its_callers_dict() -> None:
    """FSDP2 of torch 2.15 does so too, that of 2.11 does not."""
    model, seen = fully_shard(Counts()), {"total": torch.zeros(())}
    for _ in range(2):
        model(torch.ones(2, 4, requires_grad=True), seen).sum().backward()
    assert seen["total"] == 16
