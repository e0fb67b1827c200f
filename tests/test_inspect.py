"""inspect: the report's tables, saved graphs that run, and what it says of models that were compiled before."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fully_shard, inspect, plan_of, replicate
from fsdp_compile.graph.install import manager
from fsdp_compile.passes import Plan
from fsdp_compile.tools.inspect import Report
from tests.comparing import loss_of, mine
from tests.compiling import compile_blocks, no_kernels_built, num_graphs
from tests.models import Block, Stack, shard
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Saved = tuple[Path, tuple[str, str, str]]


def sharded() -> Stack:
    torch.manual_seed(0)
    return shard(Stack(num_blocks=2), mp_policy=BF16)


def step(run: Any) -> None:
    loss_of(run(mine())).backward()


def masked(report: Report) -> str:
    """The report without what differs between runs and versions of torch: times, the peak, how many nodes moved."""
    text = re.sub(r"\(\d+\.\d ms\)", "(- ms)", str(report))
    text = re.sub(r"peak \d+\.\d KiB", "peak -", re.sub(r" +\d+\.\d{3}\b", " -", text))
    return re.sub(r"overlap \d+", "overlap -", text)


class Noisy(nn.Module):
    """Dropout and a batch of unknown size: random numbers and symbolic sizes in the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.5)) * x.shape[0]


def _save(folder: str) -> tuple[str, str, str]:
    """On the passes alone; tests/matrix inspects a step on Inductor."""
    model = sharded()
    with inspect(model) as report:
        step(torch.compile(model, backend="decomposed", fullgraph=True))
    block = fully_shard(Block(dim=64), mp_policy=BF16)
    with inspect(block) as block_report:
        torch.compile(block, backend="decomposed")(torch.randn(4, 64, requires_grad=True)).sum().backward()
    noisy = fully_shard(Noisy())
    with inspect(noisy) as noisy_report:
        run = torch.compile(noisy, backend="decomposed", dynamic=True)
        run(torch.randn(7, 6)).sum().backward()
        with torch.no_grad():
            run(torch.randn(7, 6))
    if dist.get_rank() == 0:
        files = report.save(f"{folder}/stack")
        assert all(file.exists() for file in files)
        noisy_report.save(Path(folder) / "noisy")
        assert [graph.plan for graph in report.graphs] == [
            Plan.from_json((Path(folder) / "stack" / graph.name / "plan.json").read_text()) for graph in report.graphs
        ]
    return masked(report), block_report.forward.collectives(), block_report.backward.collectives()


@pytest.fixture(scope="module")
def saved(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with saved graphs, and the texts of one report."""
    folder = tmp_path_factory.mktemp("inspected")
    return folder, two_ranks.run(_save, str(folder))[0]


@pytest.mark.compat
def test_report_shows_collectives_buckets_bytes_and_passes(saved: Saved) -> None:
    assert_expected_inline(
        saved[1][0],
        """\
Stack: 3 graphs, 9 collectives, 12.1 KiB a rank

00_joint: 16 unshards and 16 reduce_grads -> 12 gathered again in backward, 4 kept
  unit              params  names                                       in backward     reduced  gathered  why
  (Stack)                4  embed.weight norm.weight norm.bias +1       kept                  4   2.0 KiB  reshard_after_forward=False
  layers.0 (Block)       6  norm.weight norm.bias up.weight up.bias +2  gathered again        6   2.2 KiB  its unit is gathered again, or a gradient reads it
  layers.1 (Block)       6  norm.weight norm.bias up.weight up.bias +2  gathered again        6   2.2 KiB  its unit is gathered again, or a gradient reads it
  predicted on 'cpu': forward - ms, backward - ms, - of them waiting; peak -
  passes: merge 0 (- ms), slices 0 (- ms), parts 0 (- ms), chosen_slices 0 (- ms), keep 16 (- ms)

01_forward: 16 unshards and 0 reduce_grads -> 4 collectives, 3.3 KiB a rank
  #  collective  unit              params  names                                       dtype  bytes/rank   bucket   copied
  0  all_gather  (Stack)                1  embed.weight                                bf16        512 B  1.0 KiB        -
  1  all_gather  layers.0 (Block)       6  norm.weight norm.bias up.weight up.bias +2  bf16      1.1 KiB  2.3 KiB  3.4 KiB
  2  all_gather  layers.1 (Block)       6  norm.weight norm.bias up.weight up.bias +2  bf16      1.1 KiB  2.3 KiB  3.4 KiB
  3  all_gather  (Stack)                3  norm.weight norm.bias head.weight           bf16        544 B  1.1 KiB  1.6 KiB
  #  launched behind          waited for before           takes  beside it   exposed
  0  begin ..                 .. embed.weight - ms - ms - ms
  1  begin ..                 .. layers.0.norm.weight - ms - ms - ms
  2  embed.weight ..          .. layers.1.norm.weight - ms - ms - ms
  3  layers.0.down.weight ..  .. norm.weight - ms - ms - ms
  #0: longer than the compute beside it: it takes - ms and - ms of compute stand beside it
  #1: queued behind another one: - ms behind all_gather of embed.weight; it takes - ms and - ms of compute stand beside it
  #2: queued behind another one: - ms behind all_gather of layers.0.norm.weight +5; it takes - ms and - ms of compute stand beside it
  passes: insert 4 (- ms), overlap - (- ms), check 4 (- ms), announce 4 (- ms)

02_backward: 12 unshards and 16 reduce_grads -> 5 collectives, 8.8 KiB a rank
  #  collective  unit              params  names                                       dtype  bytes/rank   bucket   copied
  0  all_gather  layers.1 (Block)       6  norm.weight norm.bias up.weight up.bias +2  bf16      1.1 KiB  2.3 KiB  3.3 KiB
  1  all_gather  layers.0 (Block)       6  norm.weight norm.bias up.weight up.bias +2  bf16      1.1 KiB  2.3 KiB  3.3 KiB
  2  all_to_all  layers.1 (Block)       6  norm.weight norm.bias up.weight up.bias +2  fp32      2.3 KiB  4.5 KiB  5.6 KiB
  3  all_to_all  layers.0 (Block)       6  norm.weight norm.bias up.weight up.bias +2  fp32      2.3 KiB  4.5 KiB  5.6 KiB
  4  all_to_all  (Stack)                4  embed.weight norm.weight norm.bias +1       fp32      2.1 KiB  4.1 KiB  6.1 KiB
  #  launched behind               waited for before           takes  beside it   exposed
  0  begin ..                      .. layers.1.down.weight - ms - ms - ms
  1  grad layers.1.down.weight ..  .. layers.0.down.weight - ms - ms - ms
  2  grad layers.1.norm.bias ..    .. grad embed.weight - ms - ms - ms
  3  grad layers.0.norm.bias ..    .. end - ms - ms - ms
  4  grad embed.weight ..          .. end - ms - ms - ms
  #0: longer than the compute beside it: it takes - ms and - ms of compute stand beside it
  #1: queued behind another one: - ms behind all_gather of layers.1.norm.weight +5; it takes - ms and - ms of compute stand beside it
  #4: longer than the compute beside it: it takes - ms and - ms of compute stand beside it
  passes: insert 5 (- ms), overlap - (- ms), check 5 (- ms), announce 5 (- ms)

#: order of launch in the graph that Inductor gets. bytes/rank: what one rank gives to a gather or gets from a
reduction. bucket: all ranks' parts, padding included. copied: what this rank writes once more to pack, pad
and cut; what travels alone is sent from its shard and read where it came. takes: with nothing else on the
links. beside it: compute between its launch and its wait. exposed: of waiting.
Compile caches were not read in the block (no pass runs when they hit) and not written. What was compiled
stays in use after it; another process may be served from a cache.""",
    )


@pytest.mark.compat
def test_lists_the_collectives_of_a_graph_in_the_order_of_launch(saved: Saved) -> None:
    assert_expected_inline("\n".join(saved[1][1:]), """\
all_gather  norm.weight norm.bias up.weight up.bias down.weight down.bias  bf16  33.0 KiB
all_to_all  norm.weight norm.bias up.weight up.bias down.weight down.bias  fp32  66.0 KiB""")


RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    print("FILE", path)
    runpy.run_path(path, run_name="__main__")
"""


def python(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed_by(files: list[str], folder: Path) -> dict[str, str]:
    """What each file prints, all of them run in one process."""
    parts = python("-c", RUN_ALL, *files, cwd=folder).split("FILE ")[1:]
    return {file: text for file, _, text in (part.partition("\n") for part in parts)}


@pytest.mark.slow
def test_saved_graphs_run(saved: Saved) -> None:
    folder, _ = saved
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
    graphs = groupby(files, key=lambda file: file.rpartition("/")[0])
    assert_expected_inline(
        "\n".join(f"{graph}: {' '.join(Path(file).stem for file in of_graph)}" for graph, of_graph in graphs),
        """\
noisy/00_joint: 0_captured 1_merge 2_slices 3_parts 4_chosen_slices 5_keep
noisy/01_forward: 0_captured 1_insert 2_overlap 3_check 4_announce
noisy/02_backward: 0_captured 1_insert 2_overlap 3_check 4_announce
noisy/03_inference: 0_captured 1_insert 2_overlap 3_check 4_announce
stack/00_joint: 0_captured 1_merge 2_slices 3_parts 4_chosen_slices 5_keep
stack/01_forward: 0_captured 1_insert 2_overlap 3_check 4_announce
stack/02_backward: 0_captured 1_insert 2_overlap 3_check 4_announce""",
    )
    shapes = printed_by(files, folder)
    assert "(4, 7, 31) torch.bfloat16" in shapes["stack/01_forward/3_check.py"]
    for graph in ("stack/01_forward", "stack/02_backward", "noisy/02_backward", "noisy/03_inference"):
        assert shapes[f"{graph}/0_captured.py"] == shapes[f"{graph}/3_check.py"] != ""
    # Each by itself, too: nothing is left over from another.
    assert python("noisy/02_backward/3_check.py", cwd=folder) == shapes["noisy/02_backward/3_check.py"]


def test_saved_code_names_parameters_and_bytes(saved: Saved) -> None:
    folder, _ = saved

    def said(file: str, words: str) -> list[str]:
        comments = [line.partition("  # ")[2] for line in (folder / file).read_text().splitlines()]
        return [re.sub(r"symbolic s\d+", "symbolic s0", text) for text in comments if text.startswith(words)]

    shown = [
        *said("stack/01_forward/0_captured.py", "shard of layers.0.up"),
        *said("stack/01_forward/0_captured.py", "unshard layers.0.up"),
        *said("stack/01_forward/1_insert.py", "all_gather embed"),
        *said("stack/02_backward/0_captured.py", "reduce_grad layers.1.up"),
        *said("stack/02_backward/1_insert.py", "all_to_all embed"),
        *said("noisy/01_forward/0_captured.py", "symbolic"),
    ]
    assert_expected_inline(
        "\n".join(shown),
        """\
shard of layers.0.up.weight [17, 16] fp32 1.1 KiB
shard of layers.0.up.bias [17] fp32 68 B
unshard layers.0.up.weight [33, 16] bf16 1.0 KiB
unshard layers.0.up.bias [33] bf16 66 B
all_gather embed.weight bf16 1.0 KiB (512 B a rank)
reduce_grad layers.1.up.bias [17] fp32 68 B
reduce_grad layers.1.up.weight [17, 16] fp32 1.1 KiB
all_to_all embed.weight norm.weight norm.bias head.weight fp32 4.1 KiB (2.1 KiB a rank)
symbolic s0, 7 when compiled""",
    )


@on_two_ranks
def test_one_rank_alone_inspects_a_compiled_model() -> None:
    model, x = fully_shard(nn.Linear(8, 8)), torch.ones(4, 8)
    run = torch.compile(model, backend="passes")
    run(x).sum().backward()
    if dist.get_rank() == 0:
        with inspect(run) as report:  # the compiled module will do as well
            run(x).sum().backward()
        assert [graph.stage for graph in report.graphs] == ["joint", "forward", "backward"]
        said = r"Linear had been compiled before \(in \d frames?\): that was dropped, and what ran in the block was compiled "
        assert re.fullmatch(said + r"afresh\.", report.notes[0])
    else:
        run(x).sum().backward()
    before = num_graphs()
    run(x).sum().backward()
    assert num_graphs() == before, "compiled once more after the block"
    torch.testing.assert_close(model.bias.grad.full_tensor(), torch.full((8,), 3 * 4.0))


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_compiled_train_step_is_found_by_the_model_it_reads_however_often() -> None:
    """Also more often than the limit of recompilations allows."""
    model, x = fully_shard(nn.Linear(8, 8)), torch.ones(4, 8)
    head = nn.Linear(4, 4)  # another model: what was compiled for it stays

    @torch.compile(backend="aot_eager")
    def train_step(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    other = torch.compile(lambda x: head(x).sum(), backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        train_step(x).backward()
        other(torch.ones(4))
        for _ in range(3):
            before = num_graphs()
            with inspect(model) as report:
                train_step(x).backward()
                other(torch.ones(4))
            assert num_graphs() == before + 1
            assert "had been compiled before" in report.notes[0]
            assert [graph.stage for graph in report.graphs] == ["joint"]


def _blocks() -> tuple[str, str]:
    model = compile_blocks(sharded(), fullgraph=False)
    with inspect(model) as report:
        step(model)
    with pytest.raises(LookupError) as error:
        _ = report.inference
    return str(report), str(error.value)


def test_around_compiled_blocks_the_eager_path_sends(two_ranks: Ranks) -> None:
    report, error = two_ranks.run(_blocks)[0]
    assert_expected_inline(report, """\
Stack: 0 graphs; 4 gathers and 2 reductions a step around 2 compiled units

around graphs, by the eager path:
  unit                            params  gathers  bytes/rank  in backward  reductions  bytes/rank
  layers.0 (Block) and 1 like it       6        1     1.1 KiB  again                 1     2.3 KiB

Units that are compiled by themselves, or in parts, take gathered weights: their graphs have no collective for
them, and are not shown where they have no other. The eager path gathers and reduces around them, one unit
ahead and one behind.""")
    assert error.startswith("0 inference graphs were recorded (of all: none). See report.graphs. Units that are compiled")


def _nothing() -> list[str]:
    plain, model = Stack(num_blocks=1), shard(Stack(num_blocks=1))
    said = []
    for inspected, run in (
        (plain, plain),
        (model, model),
        (model, torch.compile(model, backend="eager")),
        (model, torch.compile(model, backend="aot_eager")),
    ):
        with inspect(inspected) as report:
            step(run)
        said.append(str(report))
    with inspect(model) as report:
        torch.compile(model, backend="passes")(mine())
    said.append(str(report))
    return [one.rpartition("\n\n")[2].rpartition("may be served from a cache.\n")[2] for one in said]


@pytest.mark.more
@pytest.mark.usefixtures("fake_group_of_four")
def test_says_why_nothing_was_recorded() -> None:
    assert_expected_inline(
        "\n\n".join(_nothing()),
        """\
Nothing was recorded: Stack has no sharded module. Call fully_shard(...) on its blocks and on itself first,
and pass that model.

Nothing was recorded: Stack did not run in the block, or it ran eagerly. Compile it (torch.compile(model), or
model.compile()) and run one step of what that returns inside the block.

Nothing was recorded, though 1 graph compiled in the block: none that the passes saw reads a sharded
parameter. Use the backend inductor or aot_eager (not eager), and see TORCH_LOGS=graph_breaks,recompiles for
frames that fell back to eager.

Only joint graphs: the backend does not run Inductor's post-grad passes (aot_eager), or another setting of
post_grad_custom_pre_pass replaced ours (call fsdp_compile.install_passes() after it). The markers run as they
are, one collective each.

No backward graph: it is compiled when backward first runs. Call backward() in the block.""",
    )


@pytest.mark.usefixtures("fake_group_of_four")
def test_leaves_no_trace_outside_the_block_where_nothing_is_copied() -> None:
    model, x = fully_shard(nn.Linear(8, 8)), torch.ones(4, 8)
    run = torch.compile(model, backend="aot_eager")

    def state() -> tuple[Any, ...]:
        settings = (inductor_config.fx_graph_cache, functorch_config.enable_autograd_cache)
        return (*settings, len(manager.observers), [type(module) for module in model.modules()])

    before = state()
    with pytest.raises(ZeroDivisionError), inspect(model) as report:
        run(x).sum().backward()
        raise ZeroDivisionError
    assert state() == before
    assert report.joint.stage == "joint"  # what was recorded until then is there
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_compile.passes.manager.copied", None)
        run(x).sum().backward()
    assert len(report.graphs) == 1


@pytest.mark.more
def test_importing_costs_nothing(tmp_path: Path) -> None:
    # The flop counter takes Triton's compiler along; where that is installed, so does torch's own Inductor.
    names = ("rich", "transformers", "torch.utils.flop_counter")
    script = f"import sys, fsdp_compile; print([name for name in sys.modules if name in {names}])"
    assert python("-c", script, cwd=tmp_path) == "[]\n"


def test_a_function_is_refused_with_what_to_pass() -> None:
    with pytest.raises(TypeError) as error, inspect(print):  # type: ignore[arg-type]
        pass
    assert str(error.value) == (
        "inspect takes the model, but got builtin_function_or_method. For a compiled train step, pass the model that "
        "it trains, and call the step inside the block."
    )


class Gated(nn.Module):
    """One of two linears, as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.offset = nn.Linear(6, 9), nn.Linear(6, 9), torch.arange(9.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def far(x: torch.Tensor) -> torch.Tensor:
            return self.far(x) + self.offset + torch.full((9,), float("inf")).isnan()

        return torch.cond(x.abs().mean() < 10, self.near, far, (x,))


@pytest.mark.slow
@pytest.mark.usefixtures("fake_group_of_four")
def test_graphs_with_branches_run_by_themselves(tmp_path: Path) -> None:
    model = fully_shard(Gated())
    with inspect(model) as report, no_kernels_built():
        torch.compile(model, fullgraph=True)(torch.ones(4, 6)).sum().backward()
    report.save(tmp_path)
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.glob("*_*ward/*.py")]
    assert any("body_" in (tmp_path / file).read_text() for file in files if "forward" in file)
    shapes = printed_by(files, tmp_path)
    assert set(shapes) == set(files) and all("(4, 9) torch.float32" in shapes[file] for file in files if "forward" in file)


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_bucket_of_replicas_is_as_large_as_what_they_send() -> None:
    model = fully_shard(nn.Linear(64, 64), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    with inspect(model) as report:
        torch.compile(model, backend="passes")(torch.ones(4, 64)).sum().backward()
    launches = report.backward.launches
    assert {one.kind for one in launches} > {"all_reduce"}
    pictured = [one for graph in report.picture().steps[0].graphs if graph.stage == "backward" for one in graph.collectives]
    assert [one.bucket_bytes for one in pictured] == [one.bucket_bytes for one in launches]


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_replicated_models_plan_is_in_a_report() -> None:
    model = replicate(nn.Linear(8, 8))
    with inspect(model) as report:
        torch.compile(model, backend="passes")(torch.ones(4, 8)).sum().backward()
    assert report.joint.plan
    with pytest.raises(LookupError, match=r"Linear is whole on every rank.*report\.joint\.plan is its plan"):
        plan_of(model)
