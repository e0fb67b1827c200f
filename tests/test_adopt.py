"""adopt() and python -m fsdp_compile.run: torch's names are ours, in code that knows of nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed._composable.fsdp as composable_fsdp
import torch.distributed._composable.replicate_with_fsdp as replicate_module
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.fsdp import fully_shard as TORCH_FULLY_SHARD

import fsdp_compile
from fsdp_compile import fsdp1
from tests.comparing import train_and_compare
from tests.fsdp1_scripts import OURS, silenced, under_theirs
from tests.models import Stack, pair
from tests.on_ranks import on_two_ranks
from tests.test_fsdp1_state import check_helped

SCRIPT, WRAPPED_SCRIPT = (Path(__file__).with_name(f"fsdp{version}_script.py") for version in (2, 1))


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that imported torch's names before anybody adopted them."""
    module = types.ModuleType("a_framework")
    exec("from torch.distributed.fsdp import fully_shard as shard, share_comm_ctx, FSDPModule", vars(module))
    exec("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP", vars(module))
    monkeypatch.setitem(sys.modules, "a_framework", module)
    return module


def bound_to_torchs() -> list[types.ModuleType]:
    # The second one's package has a function of its name.
    names = ("", "._fully_shard", "._fully_shard._fully_shard")
    composable = sys.modules["torch.distributed._composable.fsdp.fully_shard"]
    return [composable_fsdp, composable, *(sys.modules[f"torch.distributed.fsdp{name}"] for name in names)]


def bound_to_torchs_class() -> list[tuple[types.ModuleType, str]]:
    checkpoint = sys.modules["torch.distributed.checkpoint.state_dict"]
    defining = sys.modules["torch.distributed.fsdp.fully_sharded_data_parallel"]
    return [(torch_fsdp, "FullyShardedDataParallel"), (defining, "FullyShardedDataParallel"), (checkpoint, "FSDP")]


@pytest.mark.compat
def test_names_are_ours_until_undone(framework: types.ModuleType) -> None:
    exec("from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler", vars(framework))
    theirs, wrapper, scaler = TORCH_FULLY_SHARD, framework.FSDP, framework.ShardedGradScaler
    replicate, register = replicate_module.replicate, torch_fsdp.register_fsdp_forward_method
    with fsdp_compile.adopt() as adoption:
        assert all(module.fully_shard is fsdp_compile.fully_shard for module in bound_to_torchs())
        assert framework.shard is fsdp_compile.fully_shard
        assert framework.share_comm_ctx is fsdp_compile.share_comm_ctx
        assert TORCH_FULLY_SHARD is fsdp_compile.fully_shard, "this module's own name"
        assert replicate_module.replicate is fsdp_compile.replicate
        assert torch_fsdp.register_fsdp_forward_method is fsdp_compile.register_fsdp_forward_method
        assert issubclass(fsdp_compile.FSDPModule, torch_fsdp.FSDPModule)
        assert issubclass(fsdp_compile.UnshardHandle, torch_fsdp.UnshardHandle)
        assert framework.FSDPModule is torch_fsdp.FSDPModule
        assert {getattr(module, name) for module, name in bound_to_torchs_class()} == {OURS}
        assert framework.FSDP is OURS and framework.ShardedGradScaler is fsdp1.ShardedGradScaler
        assert "a_framework.shard" in repr(adoption)
        with fsdp_compile.adopt() as inner:
            assert not inner.bindings
        assert framework.shard is fsdp_compile.fully_shard
        scope: dict[str, object] = {}
        exec("from torch.distributed.fsdp import fully_shard", scope)
        assert scope["fully_shard"] is fsdp_compile.fully_shard
    assert all(module.fully_shard is theirs for module in bound_to_torchs())
    assert framework.shard is theirs and theirs is not fsdp_compile.fully_shard
    assert replicate_module.replicate is replicate and torch_fsdp.register_fsdp_forward_method is register
    assert {getattr(module, name) for module, name in bound_to_torchs_class()} == {wrapper}
    assert framework.FSDP is wrapper is not OURS and framework.ShardedGradScaler is scaler


def test_what_somebody_else_changed_stays(framework: types.ModuleType) -> None:
    adoption = fsdp_compile.adopt()
    framework.shard = len
    with pytest.warns(UserWarning, match=r"^a_framework.shard changed after fsdp_compile.adopt\(\) and stays"):
        adoption.undo()
    assert framework.shard is len and framework.share_comm_ctx is torch_fsdp.share_comm_ctx
    assert torch_fsdp.fully_shard.__wrapped__ is not None, "torch's own"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adoption.undo()  # nothing is left to undo


@pytest.mark.compat
@on_two_ranks
def test_torchs_calls_shard_with_ours() -> None:
    unsharded = Stack()
    with fsdp_compile.adopt():
        model = Stack()
        model.load_state_dict(unsharded.state_dict())
        for layer in model.layers:
            torch_fsdp.fully_shard(layer)
        torch_fsdp.fully_shard(model)
        replicated = replicate_module.replicate(nn.Linear(2, 2))
        assert torch_fsdp.fully_shard.state(model) is not None
        assert replicate_module.replicate.state(replicated) is not None
        assert replicate_module.replicate.state(model) is None
    assert isinstance(model, fsdp_compile.FSDPModule) and isinstance(replicated, fsdp_compile.FSDPModule)
    train_and_compare(torch.compile(model, backend="aot_eager", fullgraph=True), model, unsharded)
    _, model = pair()
    before = torch_fsdp.fully_shard(nn.Linear(4, 4))
    with fsdp_compile.adopt():
        with pytest.raises(ValueError, match=r"FSDPLinear was sharded by torch\.distributed\.fsdp\.fully_shard"):
            torch_fsdp.fully_shard(nn.Sequential(before))
        with pytest.raises(TypeError, match=r"FSDPLinear was sharded by .* before fsdp_compile\.adopt\(\)"):
            torch_fsdp.register_fsdp_forward_method(before, "extra_repr")
        torch_fsdp.register_fsdp_forward_method(nn.Linear(4, 4), "nowhere")  # as torch: nothing to do


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(cwd), str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


class Launched:
    """What two ranks of a script printed, by the first word of the line."""

    def __init__(self, *command: str, cwd: Path) -> None:
        done = run("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *command, cwd=cwd)
        assert done.returncode == 0, done.stderr[-4000:]
        self.lines = dict(text.partition(" ")[::2] for text in done.stdout.splitlines())
        self.losses = [float(loss) for loss in self.lines["losses"].split()]
        assert len(self.losses) == 4


@pytest.mark.slow
def test_an_unchanged_script_trains_alike(tmp_path: Path) -> None:
    theirs = Launched(str(SCRIPT), "4", cwd=tmp_path)
    ours = Launched("-m", "fsdp_compile.run", str(SCRIPT), "4", cwd=tmp_path)
    assert (theirs.lines["engine"], ours.lines["engine"]) == ("True", "False")
    assert ours.losses == pytest.approx(theirs.losses, abs=2e-5)
    assert ours.lines["__main__"] == theirs.lines["__main__"], "name, arguments, path and pickling"
    as_module = Launched("-m", "fsdp_compile.run", "-m", "tests.fsdp2_script", "4", cwd=tmp_path)
    assert as_module.losses == ours.losses


@pytest.mark.slow
def test_an_unchanged_fsdp1_script_trains_alike(tmp_path: Path) -> None:
    theirs = Launched(str(WRAPPED_SCRIPT), "4", cwd=tmp_path)
    assert theirs.lines["engine"].startswith("torch.distributed.fsdp.")
    for more, graphs in ((), "0 breaks 0"), (("compile",), "1 breaks 0"):
        ours = Launched("-m", "fsdp_compile.run", str(WRAPPED_SCRIPT), "4", *more, cwd=tmp_path)
        assert ours.lines["engine"].startswith("fsdp_compile.fsdp1.")
        assert ours.losses == pytest.approx(theirs.losses, abs=2e-5)
        assert ours.lines["graphs"] == graphs and ours.lines["saved"] == theirs.lines["saved"]


SHOWS = """\
import pickle, sys, multiprocessing
class Thing: pass
def typed(x: int): ...
if __name__ == "__main__":
    import beside
    assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
    assert typed.__annotations__ == {"x": int}
    print(sys.argv, sys.path[0], __file__, __package__, __spec__ and __spec__.name, beside.fully_shard.__module__)
    sys.exit(3)
"""


@pytest.mark.parametrize("form", ["file", *(pytest.param(form, marks=pytest.mark.more) for form in ("module", "package"))])
def test_it_runs_as_python_runs_it(tmp_path: Path, form: str) -> None:
    (tmp_path / "beside.py").write_text("from torch.distributed.fsdp import fully_shard\n")
    script = tmp_path / ("show.py" if form != "package" else "show/__main__.py")
    script.parent.mkdir(exist_ok=True)
    script.write_text(SHOWS)
    what = [str(script)] if form == "file" else ["-m", "show"]
    outputs = []
    for runner in ([], ["-m", "fsdp_compile.run"]):
        done = run(*runner, *what, "--flag", "-m", cwd=tmp_path)
        assert done.returncode == 3, done.stderr
        outputs.append(done.stdout.split())
    plain, ours = outputs
    assert ours[:-1] == plain[:-1]
    assert plain[-1] == "torch.distributed.fsdp" and ours[-1].startswith("fsdp_compile")


STARTS = """\
import subprocess, sys
import torch
from torch.distributed.fsdp import fully_shard
def show(rank):
    print("spawned", fully_shard.__module__, flush=True)
if __name__ == "__main__":
    torch.multiprocessing.spawn(show, nprocs=1)
    subprocess.run([sys.executable, "-c", "import sys, mine; print('without', 'torch' in sys.modules, mine.FOUND)"], check=True)
"""


def test_processes_that_a_script_starts_adopt_as_well(tmp_path: Path) -> None:
    """Those that import torch; the user's own sitecustomize runs in all."""
    (tmp_path / "starts.py").write_text(STARTS)
    (tmp_path / "mine.py").write_text("FOUND = False\n")
    (tmp_path / "sitecustomize.py").write_text("import mine; mine.FOUND = True\n")
    done = run("-m", "fsdp_compile.run", str(tmp_path / "starts.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["spawned", "fsdp_compile.api.fully_shard", "without", "False", "True"]


TESTS = """\
from torch.distributed.fsdp import fully_shard
def test_it(worker_id):
    assert worker_id == "gw0" and fully_shard.__module__ == "fsdp_compile.api.fully_shard"
"""


@pytest.mark.slow
def test_pytests_workers_adopt_as_well(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = run("-m", "fsdp_compile.run", "-m", "pytest", "-q", "-n", "1", "test_it.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_script_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdp_compile.run import main

    monkeypatch.setattr("fsdp_compile.run.adopt", lambda: None)  # which lasts as long as the process
    monkeypatch.setattr("fsdp_compile.run._reach_processes_started", lambda: None)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere.py")])
    assert "nowhere.py is not a file" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r"There is no module nowhere_at_all"):
        main(["-m", "nowhere_at_all"])


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.more)])
@pytest.mark.parametrize("asked", ["default", "full"])
@on_two_ranks
def test_helpers_know_our_wrappers(asked: str, compiles: bool) -> None:
    """Those of ``torch.distributed.checkpoint.state_dict``, as without ``adopt()``."""
    with fsdp_compile.adopt():
        check_helped(asked, compiles)


@on_two_ranks
def test_torchs_own_wrappers_stay_torchs() -> None:
    theirs = under_theirs(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"adopt\(\) leaves FullyShardedDataParallel as torch's: 1 of its wrappers are"):
        adoption = fsdp_compile.adopt()
    with adoption, silenced():
        assert torch_fsdp.FullyShardedDataParallel is type(theirs)
        assert torch_fsdp.fully_shard is fsdp_compile.fully_shard
        theirs(torch.ones(2, 4)).sum().backward()
        theirs.clip_grad_norm_(1.0)
        assert set(helpers.get_model_state_dict(theirs)) == {"weight", "bias"}
    del theirs, adoption
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adoption = fsdp_compile.adopt()
    with adoption:
        assert torch_fsdp.FullyShardedDataParallel is OURS, "nobody holds a wrapper of torch's now"


