"""One recorded graph as a Python file that runs by itself: ``python file.py``.

header         how to run it, and in which fake process groups
forward        the graph, a line for each node, with a comment on its value, as in
                   launch = ...all_gather_into_tensor.default(cat, 2, '0')  # all_gather up.weight bf16 32.0 KiB
make_inputs    random tensors with the recorded shapes, strides, dtypes and devices
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch_compat import inductor, process_groups
from ..passes import GraphRecord
from ..passes._torch_compat import OpOverload, arguments_of
from ..passes.ir import markers
from ..passes.ir.meta import ROLE
from ..passes.ir.provenance import find_reduces, find_unshards
from ..passes.wire.spec import NAMESPACE
from .collectives import collectives_of, num_bytes_of
from .tables import format_bytes, format_dtype, format_unit, on_one_line

_BODY = "body_"  # prefix of the names of functions for nested graphs

HEADER = '''\
"""{title}

Run it: python <this file>. It needs torch {torch}{needs}.
It runs in one process. Its collectives name process groups; start_fake_groups() makes groups with these names and sizes
that communicate nothing, so shapes are right and values are not. Inputs are random (integers are 0 or 1).
"""

import torch
import torch.distributed as dist
{imports}
GROUPS = {groups}  # name: number of ranks
'''

TENSOR = '''

def tensor(size, stride, dtype, device):
    """A random tensor; overlapping strides included."""
    length = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if 0 not in size else 0
    if dtype.is_floating_point or dtype.is_complex:
        flat = torch.randn(length, device=device).to(dtype)
    else:
        flat = torch.randint(0, 2, (length,), device=device).to(dtype)
    return flat.as_strided(size, stride)
'''

MAIN = """

def show(value):
    if isinstance(value, (list, tuple)):
        for item in value:
            show(item)
    elif isinstance(value, torch.Tensor):
        print(tuple(value.shape), value.dtype)
    else:
        print(value)


if __name__ == "__main__":
    start_fake_groups()
    with torch.no_grad():
        outputs = forward(*make_inputs())
    show(outputs)
    dist.destroy_process_group()
"""


def runnable_code(record: GraphRecord, step: int) -> str:
    """Return the source of the graph before the first pass (``step`` 0) or after the ``step``-th."""
    graph = record.snapshots[step]
    comments = _comments(record, step)
    when = "as it reached the passes" if step == 0 else f"after the pass {record.passes[step - 1].name!r}"
    code = graph.python_code("self", verbose=False)
    body = code.src[code.src.index("def forward(") :].splitlines()[1:]
    inputs = graph.find_nodes(op="placeholder")
    bodies = list(_bodies(graph))
    graphs = (graph, *(one.graph for one in bodies))
    namespaces = {name: operator for one in graphs for name, operator in _namespaces(one).items()}
    names = {name: value for one in (code.globals, *(each.names for each in bodies)) for name, value in one.items()}
    text = "\n".join([*(each.source for each in bodies), *body])
    parts = [
        HEADER.format(
            title=f"{record.stage.capitalize()} graph {when}, recorded by fsdp_compile.inspect.",
            torch=torch.__version__.partition("+")[0],
            needs=" and fsdp_compile (for its ops)" if NAMESPACE in namespaces else "",
            imports="".join(f"{line}\n" for line in _imports(names, namespaces, text)),
            groups=_groups(record.snapshots[0], *graphs),
        ),
        TENSOR,
        *(f"\n\n{each.source}\n" for each in bodies),
        *_constants(graph, text),
        "\n\n" + process_groups.FAKE_GROUPS_SOURCE.rstrip(),
        "\n\n\ndef forward(\n",
        *[f"    {node.name},{comments[node.name]}\n" for node in inputs],
        "):\n",
        *[f"{_commented(line, comments)}\n" for line in body],
        "\n\ndef make_inputs():\n    return [\n",
        *[f"        {_input(node.meta.get('val'))},  # {node.name}\n" for node in inputs],
        "    ]\n",
        MAIN,
    ]
    return "".join(parts)


def node_lines(record: GraphRecord, step: int) -> list[str]:
    """Return the graph for reading, a line for each node: ``mm = mm(x, t)  # [4, 8] fp32 128 B``."""
    graph = record.snapshots[step]
    comments = _comments(record, step)
    return [f"{_as_call(node)}{comments[node.name]}" for node in graph.nodes]


def _as_call(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name} = {'input' if node.op == 'placeholder' else 'constant'}"
    given = [*map(_as_argument, node.args)]
    if getattr(node.target, "namespace", None) != NAMESPACE:  # a marker's keywords repeat what its comment says
        given += [f"{name}={_as_argument(value)}" for name, value in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(given)}"
    name = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
    return f"{node.name} = {name}({', '.join(given)})"


def _as_argument(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_as_argument, value))}]"
    text = on_one_line(str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _commented(line: str, comments: dict[str, str]) -> str:
    # "name = op(...);  other = None": the assignments of None stay, they show where a value dies.
    found = re.match(r"    (\w+)( : [^=]+)? = ", line)
    return line + comments.get(found[1], "") if found else line


def _comments(record: GraphRecord, step: int) -> dict[str, str]:
    """Return the comment for each node, by the node's name."""
    graph = record.snapshots[step]
    said: dict[str, list[str]] = {}
    for marker in (*find_unshards(graph), *find_reduces(graph)):
        said[marker.node.name] = [str(marker.node.target.__name__).partition(".")[0], marker.fqn]  # type: ignore[union-attr]
    for node in graph.nodes:
        if ROLE in node.meta:
            said[node.name] = [f"{node.meta[ROLE].kind} of {format_unit(node.meta[ROLE].unit)}:"]
    first = record.snapshots[0]
    shards = {_input_behind(marker.shard).name: marker.fqn for marker in find_unshards(first)}
    for node in graph.find_nodes(op="placeholder"):
        if node.name in shards:
            said[node.name] = ["shard of", shards[node.name]]
    comments = {}
    for node in graph.nodes:
        words = [*said.get(node.name, ()), *_describe(node.meta.get("val"))]
        comments[node.name] = f"  # {on_one_line(' '.join(words))}" if words else ""
    for collective in collectives_of(graph, record.plan):
        names = on_one_line(" ".join(collective.fqns))
        comments[collective.node.name] = (
            f"  # {collective.kind} {names} {format_dtype(collective.dtype)} {format_bytes(collective.bucket_bytes)}"
            f" ({format_bytes(collective.num_bytes)} a rank)"
        )
    return comments


def _input_behind(node: fx.Node) -> fx.Node:
    """Return the graph input that ``node`` is a view or a cast of."""
    while node.op != "placeholder" and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _describe(value: Any) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield f"[{', '.join(map(str, value.shape))}]"
        yield format_dtype(value.dtype)
        yield format_bytes(num_bytes_of(value))
    elif isinstance(value, torch.SymInt):
        yield f"symbolic {value}, {inductor.size_when_compiled(value)} when compiled"
    elif isinstance(value, torch.SymFloat):
        yield str(value)
    elif value is not None and not isinstance(value, (tuple, list, bool, int, float)):
        yield f"{type(value).__name__}, not recorded"


def _namespaces(graph: fx.Graph) -> dict[str, str]:
    """Return the namespaces of the graph's operators, each with the name of one operator in it."""
    operators = [node.target for node in graph.nodes if isinstance(node.target, OpOverload)]
    return {operator.namespace: operator.name() for operator in operators}


_ALWAYS_THERE = {"aten", "prims", "_c10d_functional", "inductor", "higher_order"}


def _imports(names: dict[str, Any], namespaces: dict[str, str], body: str) -> Iterator[str]:
    """Yield import statements for the names in the code and for the modules that register its operators."""
    for name, value in names.items():
        if name == "torch" or not re.search(rf"\b{name}\b", body):
            continue
        module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(value, float):
            yield f"{name} = float({str(value)!r})"
        elif module is not None and qualname is not None and "." not in qualname:
            yield f"from {module} import {qualname} as {name}"
        else:
            yield f"# {name} is missing: it was {value!r}"
    for namespace, operator in namespaces.items():
        if namespace == NAMESPACE:
            yield "import fsdp_compile  # registers torch.ops.fsdpc"
        elif namespace == "prims" and "prims.inductor_" in body:
            yield "import torch._inductor.inductor_prims"
        elif namespace not in _ALWAYS_THERE:
            yield f"# Import here what registers torch.ops.{namespace} ({operator}), unless torch does."


def _groups(captured: fx.Graph, *graphs: fx.Graph) -> dict[str, int]:
    """Return the name and size of every process group that a marker or a collective names.

    An all-reduce has no group size among its arguments; the marker in the captured graph that it comes from has one.
    """
    groups: dict[str, int] = {}
    for node in (node for graph in (captured, *graphs) for node in graph.nodes):
        if node.target in (markers.unshard, markers.reduce_grad):
            spec = markers.spec_in(node)
            groups |= {spec.group: spec.num_shards, spec.replicate_group: spec.num_replicas}
        elif getattr(node.target, "namespace", None) in (NAMESPACE, "_c10d_functional"):
            arguments = arguments_of(node)
            if "group_name" in arguments:
                name = str(arguments["group_name"])
                size = arguments.get("group_size") or len(arguments.get("input_split_sizes") or ()) or 1
                groups[name] = max(groups.get(name, 1), size)
    groups.pop("", None)  # of a parameter that nobody shards, or that has no replicas
    return groups


def _constants(graph: fx.Graph, body: str) -> Iterator[str]:
    """Yield assignments for the symbolic sizes that the code names and for the constants that the graph owns."""
    symbols: dict[str, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and re.fullmatch(r"\w+", str(value)):
            symbols[str(value)] = inductor.size_when_compiled(value)
    for name, number in symbols.items():
        if re.search(rf"\b{name}\b", body):
            yield f"{name} = {number}  # a symbolic size; the value seen when it was compiled\n"
    if owned := _namespace_of(graph, _BODY):
        yield f"self = {owned}  # constants of the graph\n"


def _namespace_of(graph: fx.Graph, prefix: str) -> str:
    """Return an expression for the constants and nested graphs that the graph owns; empty where there are none."""
    owned = {str(node.target): node for node in graph.nodes if node.op == "get_attr"}
    fields = ", ".join(f"{name}={_owned(graph, node, prefix)}" for name, node in owned.items())
    return f"__import__('types').SimpleNamespace({fields})" if owned else ""


@dataclass(frozen=True)
class _Body:
    """A nested graph, such as a branch of ``torch.cond``, for which the file has a function."""

    graph: fx.Graph
    source: str
    names: dict[str, Any]


def _bodies(graph: fx.Graph, prefix: str = _BODY) -> Iterator[_Body]:
    """Yield the nested graphs, each before the graph that calls it."""
    for name in dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"):
        inner = getattr(graph.owning_module, name, None)
        if not isinstance(inner, fx.GraphModule):
            continue
        yield from _bodies(inner.graph, f"{prefix}{name}_")
        code = inner.graph.python_code("self", verbose=False)
        head, *lines = code.src[code.src.index("def forward(") :].splitlines()
        head = re.sub(r"^def forward\(self(, )?", f"def {prefix}{name}(", head)
        if owned := _namespace_of(inner.graph, f"{prefix}{name}_"):
            lines.insert(0, f"    self = {owned}")
        yield _Body(inner.graph, "\n".join([head, *lines]), code.globals)


def _owned(graph: fx.Graph, node: fx.Node, prefix: str) -> str:
    value = getattr(graph.owning_module, str(node.target), node.meta.get("val"))
    if isinstance(value, fx.GraphModule):
        return prefix + str(node.target)
    if type(value) is torch.Tensor and value.numel() <= 64:
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}, device={str(value.device)!r})"
    return _input(value)


def _input(value: Any) -> str:
    """Return an expression for a value like the recorded one."""
    if isinstance(value, torch.Tensor):
        size, stride = [[inductor.size_when_compiled(n) for n in numbers] for numbers in (value.shape, value.stride())]
        return f"tensor({size}, {stride}, {value.dtype}, {str(value.device)!r})"
    if isinstance(value, torch.SymInt):
        return f"{inductor.size_when_compiled(value)}"
    if isinstance(value, torch.SymFloat):
        return "0.5"
    return repr(value) if isinstance(value, (bool, int, float, str)) else "None"
