"""Ranks compare what their graphs launch before these launch anything, whether a cache had the graphs or not."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fsdp_compile.graph.install import manager
from fsdp_compile.passes import _torch_compat as compat
from fsdp_compile.passes.ranks.agree import Agreement
from fsdp_compile.passes.wire.ledger import GraphText, Ledger, ListedLaunch, ledger


def _text(*names: str) -> GraphText:
    return GraphText("forward", "", (), tuple(ListedLaunch("all_gather", "g", "float32", 64, (name,), ()) for name in names))


@pytest.fixture
def two_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of two ranks."""
    store = dist.HashStore()
    monkeypatch.setattr(compat, "default_store", lambda: store)
    monkeypatch.setattr(compat, "group_ranks", lambda group: (0, 1))


@pytest.mark.usefixtures("two_of_them")
def test_parameters_of_equal_shape_that_change_places() -> None:
    first, second = Agreement(), Agreement()
    for _ in range(2):  # running it once more is no other graph
        first.check(_text("a", "b"))
        second.check(_text("a", "b"))
    first.check(_text("c", "d"))
    for _ in range(2):  # whoever tries it again is told again
        with pytest.raises(RuntimeError, match=r"launches other collectives .* one forward graph: the same ones in another order"):
            second.check(_text("d", "c"))
    second.check(_text("c", "d"))


@pytest.mark.usefixtures("two_of_them")
@pytest.mark.parametrize("there", [("weight", "weight@3"), ("weight:0", "weight:1")])
def test_parameters_that_share_a_name_and_parts_of_one_are_told_apart(there: tuple[str, ...]) -> None:
    Agreement().check(_text("weight", "weight@2"))
    with pytest.raises(RuntimeError, match="only here"):
        Agreement().check(_text(*there))


def test_a_rank_that_gathers_from_fewer_ranks_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that keeps a slice: the name of a group says nothing, the number of its ranks does."""
    store = dist.HashStore()
    monkeypatch.setattr(compat, "default_store", lambda: store)
    monkeypatch.setattr(compat, "group_ranks", lambda group: (0, 1) if group == "node" else (0, 1, 2, 3))
    summed = ListedLaunch("reduce_scatter", "all", "float32", 64, ("a",), ())
    texts = [
        GraphText("backward", "", (), (ListedLaunch("all_gather", group, "float32", 64, ("a",), ()), summed))
        for group in ("all", "other name", "node")
    ]
    for text in texts[:2]:
        Agreement().check(text)
    with pytest.raises(RuntimeError, match=r"only here .*2 ranks.*only there .*4 ranks.*same arguments"):
        Agreement().check(texts[2])


@pytest.mark.usefixtures("two_of_them")
def test_a_graph_is_compared_before_its_first_launch() -> None:
    assert ledger.on_text is not None and ledger.on_text.__self__ is manager._agreement  # type: ignore[attr-defined]
    of_ranks = [Ledger(), Ledger()]
    for one in of_ranks:
        one.on_text = Agreement().check
    of_ranks[0].begin([], _text("e", "f").dumps())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in another order"):
            of_ranks[1].begin([], _text("f", "e").dumps())
    assert not [*of_ranks[1].ran()]
