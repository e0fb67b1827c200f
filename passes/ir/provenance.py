"""Give markers absolute names, from the metadata that Dynamo and AOTAutograd leave on nodes.

A marker's own FQN is relative to the module given to ``fully_shard``, so that equal blocks give equal graphs:

    reader in nn_module_stack    L['self'].layers.3.attn.wq
    FQN in the marker                              attn.wq.weight
    unit (what is left)                 layers.3                    ->  absolute FQN  layers.3.attn.wq.weight

A reader need not be the owner (tied weights, ``self.head.weight`` read by the root), so the reader whose path agrees
with the FQN in most components decides, and a marker without any usable path is named by its position. In a unit of
several modules, each member has a path of its own, and the unit has all of them ("norm, head"). If one graph reads
several models, a path begins with the model's name there. Names are written in the first graph that has the markers,
and stay: graphs that are cut from it have the same names for a parameter and a unit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from ..wire.spec import ParamSpec, with_part, with_use, without_use
from . import markers
from .markers import change_spec, spec_in
from .module_paths import path_of, without_wrappers
from .nodes import VIEWS, source_of
from .phases import phase_of

_FQN = "fsdp_fqn"
_UNIT = "fsdp_unit"
_USE = "fsdp_use"
_MODEL = "fsdp_model"  # in a graph that reads several
_MEMBER = re.compile(r"^(\[\d+\])\.")  # the prefix of an FQN in a unit of several modules


@dataclass(frozen=True)
class Marker:
    """One marker node with its spec and its names in this graph."""

    node: fx.Node
    spec: ParamSpec
    fqn: str  # absolute in the compiled frame, unique in the graph
    unit: str  # the fully_shard call that it belongs to: markers of one unit may share a bucket

    @property
    def shard(self) -> fx.Node:
        """The shard that an unshard gathers; for a reduce_grad, the full gradient."""
        source = self.node.args[0]
        assert isinstance(source, fx.Node)
        return source


def unshard_nodes(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=markers.unshard)


def reduce_nodes(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=markers.reduce_grad)


def has_markers(graph: fx.Graph) -> bool:
    return bool(unshard_nodes(graph) or reduce_nodes(graph))


def groups_of(graph: fx.Graph) -> set[str]:
    """Return the names of the process groups that the markers of the graph use."""
    specs = map(spec_in, (*unshard_nodes(graph), *reduce_nodes(graph)))
    return {group for spec in specs for group in (spec.group, spec.replicate_group) if group}


def find_unshards(graph: fx.Graph) -> list[Marker]:
    """Return the gathers of the graph, named, in graph order."""
    return _named(unshard_nodes(graph))


def find_reduces(graph: fx.Graph) -> list[Marker]:
    """Return the reductions of the graph, named, in graph order."""
    return _named(reduce_nodes(graph))


def num_units_of(gathers: Iterable[Marker]) -> int:
    """Return the least number of units of these gathers: units with one name have different shards of equal FQNs.

    A unit has one name in all of its uses, but for their numbers.
    """
    shards: dict[str, dict[tuple[object, ...], set[fx.Node]]] = {}
    for one in gathers:
        if whole_of(one.node) is None:
            alike = shards.setdefault(without_use(one.unit), {}).setdefault(_alike(one.node), set())
            alike.add(_behind_views(one.shard))
    return sum(max(map(len, of_unit.values())) for of_unit in shards.values())


def name_gathers(graph: fx.Graph) -> None:
    """Write absolute names on the gathers of a graph that was not cut: all readers are there, with their paths."""
    by_shard: dict[fx.Node, list[fx.Node]] = {}
    for node in unshard_nodes(graph):
        by_shard.setdefault(_behind_views(node.args[0]), []).append(node)  # type: ignore[arg-type]
    _write_names(list(by_shard.values()))


def put_in_use(gather: fx.Node, use: int, unit: str) -> None:
    """Write on a gather which use of its unit it is of, and the unit's name there; a kept weight is gathered once."""
    gather.meta[_USE], gather.meta[_UNIT] = use, unit
    gather.meta[_FQN] = with_use(gather.meta[_FQN], use)
    if spec_in(gather).regather:
        change_spec(gather, use=use)


def annotate_reductions(graph: fx.Graph) -> None:
    """Write on the reductions of a joint graph the names of their gathers.

    They are matched by their sequence number: AOTAutograd gives a backward node the number of its forward node.
    """
    by_sequence = {node.meta["seq_nr"]: node for node in unshard_nodes(graph) if "seq_nr" in node.meta}
    for node in reduce_nodes(graph):
        gather = by_sequence.get(node.meta.get("seq_nr"))
        if gather is not None and spec_in(gather).fqn == spec_in(node).fqn and not phase_of(node):
            _name_alike(node, gather)


def name_reductions(graph: fx.Graph) -> None:
    """Write names on the reductions of a graph with phases, where nothing links them to their merged gathers.

    Equal units end backward in the reverse order of their forward. If some of them are frozen, nothing tells which ones
    were reduced: parameters that are not reduced as often as gathered stay nameless.
    """
    gathered: dict[tuple[object, ...], list[fx.Node]] = {}
    reduced: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in unshard_nodes(graph):
        gathered.setdefault((phase_of(node), *_alike(node)), []).append(node)
    for node in reduce_nodes(graph):
        reduced.setdefault((phase_of(node), *_alike(node)), []).append(node)
    for (phase, *alike), nodes in reduced.items():
        assert isinstance(phase, int)
        gathers = gathered.get((phase - 1, *alike), [])
        if gathers and len(nodes) % len(gathers) == 0:  # as often, or for several losses one after another
            for index, node in enumerate(nodes):
                _name_alike(node, gathers[-1 - index % len(gathers)])


def _name_alike(reduction: fx.Node, gather: fx.Node) -> None:
    for key in (_FQN, _UNIT):
        if key in gather.meta:
            reduction.meta[key] = gather.meta[key]
    change_spec(reduction, use=gather.meta.get(_USE, 1))


def _alike(node: fx.Node) -> tuple[object, ...]:
    """Return what equal parameters of equal units have in common."""
    spec = spec_in(node)
    return spec.unit, spec.fqn, spec.part


def _behind_views(node: fx.Node) -> fx.Node:
    return source_of(node, lambda one: one.target in VIEWS)


def _named(nodes: list[fx.Node]) -> list[Marker]:
    _write_names([[node] for node in nodes if _FQN not in node.meta])
    _count_nameless(nodes)
    found: dict[fx.Node, Marker] = {}
    seen: set[str] = set()
    # Gathers from slices come last and get the names that are left: no cut graph has one beside the gather that it was
    # cut from, and a marker must have the same name in a cut graph as here.
    for node in sorted(nodes, key=lambda node: whole_of(node) is not None):
        spec = spec_in(node)
        fqn, unit = node.meta[_FQN], node.meta[_UNIT]
        fqn = with_part(fqn, spec.part)
        base, copy = fqn, 2
        while fqn in seen:  # the same parameter gathered twice in one graph, or two of one name
            fqn, copy = f"{base}@{copy}", copy + 1
        seen.add(fqn)
        found[node] = Marker(node, spec, fqn, f"{spec.unit}:{unit}")
    return [found[node] for node in nodes]


def whole_of(marker: fx.Node) -> fx.Node | None:
    """If this marker gathers slices of a parameter, return the marker that gathered the whole parameter; else None."""
    piece = marker.args[0]
    if isinstance(piece, fx.Node) and piece.target is markers.keep_slice:
        return piece.all_input_nodes[0]
    return None


def settle_names(graph: fx.Graph) -> None:
    """Write on each marker the one name that it has in the graphs that are cut from this one.

    A gather from slices has the name of the gather that these were cut from: no cut graph has both.
    """
    for marker in (*find_unshards(graph), *find_reduces(graph)):
        part = with_part("", marker.spec.part)
        whole = whole_of(marker.node)
        marker.node.meta[_FQN] = marker.fqn.removesuffix(part) if whole is None else whole.meta[_FQN]


def settle_names_of_phases(graph: fx.Graph) -> None:
    """Write on each marker of a graph with phases the one name that it keeps.

    Phase 0 gathers w and phase 1 gathers w@2; the first backward reduces w and the second one w@2.
    """
    for found, num_phases in ((find_unshards(graph), 1), (find_reduces(graph), 2)):
        times = Counter[tuple[str, int]]()
        for marker in found:
            base, time = marker.node.meta[_FQN], phase_of(marker.node) // num_phases + 1
            name = base if time == 1 else f"{base}@{time}"
            times[name, marker.spec.part] += 1
            again = times[name, marker.spec.part]
            marker.node.meta[_FQN] = name if again == 1 else f"{name}.{again}"


def _count_nameless(nodes: list[fx.Node]) -> None:
    """Name the markers that got no name from a reader by their position among those of equal units."""
    counted = Counter[tuple[object, ...]]()
    for node in nodes:
        if _FQN not in node.meta:
            alike = _alike(node)
            node.meta[_FQN], node.meta[_UNIT] = f"#{counted[alike]}.{spec_in(node).fqn}", f"#{counted[alike]}"
            counted[alike] += 1


def _write_names(parameters: list[list[fx.Node]]) -> None:
    """Write the names of each parameter and its unit on all of its markers, if a reader tells them."""
    members: dict[str, dict[str, list[str]]] = {}  # in a unit of several modules: paths of each member, as they come
    named = []
    found = _prefixes(parameters)
    one_model = len({model for _, (model, _) in found if model}) <= 1
    for readers, (model, path) in found:
        prefix = path if one_model else ".".join(filter(None, (model, path)))
        unit, fqn = spec_in(readers[0]).unit, spec_in(readers[0]).fqn
        member = _MEMBER.match(fqn)
        fqn = fqn[member.end() :] if member else fqn
        paths = members.setdefault(unit, {}).setdefault(member[1], []) if member else [prefix]
        if prefix not in paths:
            paths.append(prefix)
        named.append((readers, f"{prefix}.{fqn}" if prefix else fqn, unit, paths, paths.index(prefix)))
    for readers, fqn, unit, paths, place in named:
        siblings = sorted(members.get(unit, {"[0]": paths}).items(), key=lambda item: int(item[0][1:-1]))
        for node in readers:
            node.meta[_FQN] = fqn
            if not one_model:
                node.meta[_MODEL] = True
            node.meta[_UNIT] = ", ".join(paths[place] for _, paths in siblings if place < len(paths))


def _prefixes(parameters: list[list[fx.Node]]) -> list[tuple[list[fx.Node], tuple[str, str]]]:
    """Return the readers of each parameter with its model and its unit's path there, of those that have a path.

    A tied weight may have no reader under the name that it has in its unit, as T5's ``shared``. Its unit is then the
    innermost of its class around the reader.
    """
    best = [(readers, one) for readers in parameters if (one := _best_prefix(readers)) is not None]
    known: dict[str, set[tuple[str, str]]] = {}
    for readers, (is_sure, *place) in best:
        if is_sure:
            known.setdefault(spec_in(readers[0]).unit, set()).add((place[0], place[1]))
    found = []
    for readers, (is_sure, model, path) in best:
        around = known.get(spec_in(readers[0]).unit, ()) if not is_sure else ()
        paths = [one for of, one in around if of == model and (not one or f"{path}.".startswith(f"{one}."))]
        found.append((readers, (model, max(paths, key=len, default=path))))
    return found


def _best_prefix(readers: list[fx.Node]) -> tuple[bool, str, str] | None:
    """Return the model and the unit's path in it, by the reader that agrees best with the FQN; None without a path.

    The first value says whether a reader agrees at all.
    """
    owner: list[str] = []
    best: tuple[int, str, str] | None = None
    for node in readers:
        found = reader_path(node)
        if found is None:
            continue
        model, path = found
        owner = _MEMBER.sub("", spec_in(node).fqn, count=1).split(".")[:-1]
        agreement, prefix = _strip(path, without_wrappers(owner))
        if best is None or agreement > best[0]:
            best = (agreement, model, prefix)
    return None if best is None else (best[0] > 0 or not owner, *best[1:])


def _strip(path: list[str], owner: list[str]) -> tuple[int, str]:
    """Find the longest head of ``owner`` in ``path``; return (components found, what stands before them)."""
    for length in range(min(len(owner), len(path)), 0, -1):
        for start in range(len(path) - length, -1, -1):
            if path[start : start + length] == owner[:length]:
                return length, ".".join(path[:start])
    return 0, ".".join(path)


def calls_around(node: fx.Node) -> Iterator[tuple[str, str, int]]:
    """Yield the modules that read a parameter here, from the outermost on: id, path, and which call of it runs.

    Dynamo counts the calls of a module in a graph: the second one has ``@1`` behind the id. A module that stands in two
    places of its model has two paths.
    """
    for key, (source, *_) in (node.meta.get("nn_module_stack") or {}).items():
        model, path = path_of(source)
        module, _, number = str(key).partition("@")
        yield module, ".".join([*([model] if _MODEL in node.meta else []), *path]), int(number or 0)


def reader_path(node: fx.Node) -> tuple[str, list[str]] | None:
    """Return the model's name in the frame, and the reader's path in it; None if the reader has no path."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ("", []) if node.target is markers.unshard and "seq_nr" in node.meta else None
    return path_of(list(stack.values())[-1][0])
