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
from tests.models import Stack
from tests.on_ranks import on_two_ranks
from tests.test_fsdp1_state import check_helped


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that imported torch's names before anybody adopted them."""
    module = types.ModuleType("a_framework")
    exec("from torch.distributed.fsdp import fully_shard as shard, share_comm_ctx, FSDPModule", vars(module))
    exec("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP", vars(module))
    monkeypatch.setitem(sys.modules, "a_framework", module)
    # A wrapper that an earlier test made has told torch's helpers for state dicts of our class.
    monkeypatch.setattr(helpers, "FSDP", vars(module)["FSDP"])
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
    unsharded = Stack(1)
    with fsdp_compile.adopt():
        model = Stack(1)
        model.load_state_dict(unsharded.state_dict())
        for layer in model.layers:
            torch_fsdp.fully_shard(layer)
        torch_fsdp.fully_shard(model)
        replicated = replicate_module.replicate(nn.Linear(2, 2))
        assert torch_fsdp.fully_shard.state(model) is not None
        assert replicate_module.replicate.state(replicated) is not None
        assert replicate_module.replicate.state(model) is None
    assert isinstance(model, fsdp_compile.FSDPModule) and isinstance(replicated, fsdp_compile.FSDPModule)
    train_and_compare(model, model, unsharded, steps=1)
    before = torch_fsdp.fully_shard(nn.Linear(4, 4))
    with fsdp_compile.adopt():
        with pytest.raises(ValueError, match=r"FSDPLinear was sharded by torch\.distributed\.fsdp\.fully_shard"):
            torch_fsdp.fully_shard(nn.Sequential(before))
        with pytest.raises(TypeError, match=r"FSDPLinear was sharded by .* before fsdp_compile\.adopt\(\)"):
            torch_fsdp.register_fsdp_forward_method(before, "extra_repr")
        torch_fsdp.register_fsdp_forward_method(nn.Linear(4, 4), "nowhere")  # as torch: nothing to do


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(cwd), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


SHOWS = """\
import os, pickle, sys, multiprocessing
class Thing: pass
def typed(x: int): ...
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
    assert typed.__annotations__ == {"x": int}
    print(sys.argv, sys.path[0], __file__, __package__, __spec__ and __spec__.name)
    if "torch" in sys.modules:
        import subprocess, beside, torch
        print("here", beside.fully_shard.__module__, flush=True)
        torch.multiprocessing.spawn(beside.show, nprocs=1)
        look = "import sys, mine; print('without', 'torch' in sys.modules, mine.FOUND)"
        subprocess.run([sys.executable, "-c", look], check=True)
    sys.exit(3)
"""
BESIDE = """\
from torch.distributed.fsdp import fully_shard
def show(rank):
    print("spawned", fully_shard.__module__, flush=True)
"""


@pytest.mark.more
@pytest.mark.parametrize("form", [pytest.param("file", marks=pytest.mark.slow), "package"])
def test_it_runs_as_python_runs_it_and_what_it_starts_adopts_as_well(tmp_path: Path, form: str) -> None:
    """Processes adopt that import torch; the user's own sitecustomize runs in all."""
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "mine.py").write_text("FOUND = False\n")
    (tmp_path / "sitecustomize.py").write_text("import mine; mine.FOUND = True\n")
    script = tmp_path / ("show.py" if form == "file" else "show/__main__.py")
    script.parent.mkdir(exist_ok=True)
    script.write_text(SHOWS)
    what = [str(script)] if form == "file" else ["-m", "show"]
    outputs = []
    for runner in ([], ["-m", "fsdp_compile.run"]):
        done = run(*runner, *what, "--flag", "-m", cwd=tmp_path)
        assert done.returncode == 3, done.stderr
        outputs.append(done.stdout.splitlines())
    (plain,), (ours, *adopted) = outputs
    assert ours == plain
    names = "fsdp_compile.api.fully_shard"
    assert adopted == [f"here {names}", f"spawned {names}", "without False True"]


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


@on_two_ranks
def test_helpers_know_our_wrappers() -> None:
    """Those of ``torch.distributed.checkpoint.state_dict``, as without ``adopt()``."""
    with fsdp_compile.adopt():
        for asked in ("default", "full"):
            check_helped(asked, compiles=False)


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
