"""adopt() and python -m fsdp_compile.run: torch's names are ours, in code that knows of nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp as composable_fsdp
import torch.distributed._composable.replicate_with_fsdp as replicate_module
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.fsdp import fully_shard as TORCH_FULLY_SHARD
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import fsdp1
from tests.comparing import batches, loss_of, train_and_compare
from tests.fsdp1_scripts import CPU, OURS, silenced, under_theirs
from tests.models import Block, Stack, pair
from tests.ranks import Ranks

SCRIPT = Path(__file__).with_name("fsdp2_script.py")


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that imported torch's names before anybody adopted them."""
    module = types.ModuleType("a_framework")
    exec("from torch.distributed.fsdp import fully_shard as shard, share_comm_ctx, FSDPModule", vars(module))
    monkeypatch.setitem(sys.modules, "a_framework", module)
    return module


def bound_to_torchs() -> list[types.ModuleType]:
    # The second one's package has a function of its name.
    names = ("", "._fully_shard", "._fully_shard._fully_shard")
    composable = sys.modules["torch.distributed._composable.fsdp.fully_shard"]
    return [composable_fsdp, composable, *(sys.modules[f"torch.distributed.fsdp{name}"] for name in names)]


@pytest.mark.compat
def test_names_are_ours_until_undone(framework: types.ModuleType) -> None:
    theirs = TORCH_FULLY_SHARD
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


def _adopted() -> None:
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


@pytest.mark.compat
def test_torchs_calls_shard_with_ours(two_ranks: Ranks) -> None:
    two_ranks.run(_adopted)


def torchrun(*command: str, cwd: Path) -> str:
    paths = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run([*launcher, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def line(output: str, first_word: str) -> str:
    (found,) = (text for text in output.splitlines() if text.startswith(first_word + " "))
    return found


@pytest.mark.more
def test_an_unchanged_script_trains_alike(tmp_path: Path) -> None:
    theirs = torchrun(str(SCRIPT), "4", cwd=tmp_path)
    ours = torchrun("-m", "fsdp_compile.run", str(SCRIPT), "4", cwd=tmp_path)
    assert line(theirs, "engine") == "engine True" and line(ours, "engine") == "engine False"
    expected, got = ([float(loss) for loss in line(output, "losses").split()[1:]] for output in (theirs, ours))
    assert len(got) == 4 and got == pytest.approx(expected, abs=2e-5)
    assert line(ours, "__main__") == line(theirs, "__main__"), "name, arguments, path and pickling"
    as_module = torchrun("-m", "fsdp_compile.run", "-m", "tests.fsdp2_script", "4", cwd=tmp_path)
    assert line(as_module, "losses") == line(ours, "losses")


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
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    for runner in ([], ["-m", "fsdp_compile.run"]):
        done = subprocess.run(
            [sys.executable, *runner, *what, "--flag", "-m"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SCRIPT.parents[1])])}
    command = [sys.executable, "-m", "fsdp_compile.run", str(tmp_path / "starts.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["spawned", "fsdp_compile.api.fully_shard", "without", "False", "True"]


TESTS = """\
from torch.distributed.fsdp import fully_shard
def test_it(worker_id):
    assert worker_id == "gw0" and fully_shard.__module__ == "fsdp_compile.api.fully_shard"
"""


@pytest.mark.more
def test_pytests_workers_adopt_as_well(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, "-m", "fsdp_compile.run", "-m", "pytest", "-q", "-n", "1", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
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


WRAPPED_SCRIPT = Path(__file__).with_name("fsdp1_script.py")


def bound_to_torchs_class() -> list[tuple[types.ModuleType, str]]:
    checkpoint = sys.modules["torch.distributed.checkpoint.state_dict"]
    defining = sys.modules["torch.distributed.fsdp.fully_sharded_data_parallel"]
    return [(torch_fsdp, "FullyShardedDataParallel"), (defining, "FullyShardedDataParallel"), (checkpoint, "FSDP")]


@pytest.mark.compat
def test_fsdp1s_class_is_ours_until_undone(framework: types.ModuleType) -> None:
    exec("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP", vars(framework))
    exec("from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler", vars(framework))
    theirs, scaler = framework.FSDP, framework.ShardedGradScaler
    with fsdp_compile.adopt():
        assert {getattr(module, name) for module, name in bound_to_torchs_class()} == {OURS}
        assert framework.FSDP is OURS and framework.ShardedGradScaler is fsdp1.ShardedGradScaler
    assert {getattr(module, name) for module, name in bound_to_torchs_class()} == {theirs}
    assert framework.FSDP is theirs is not OURS and framework.ShardedGradScaler is scaler


def _wrap_and_train(compiles: bool) -> tuple[Any, Any]:
    """By torch's names, whatever they are."""
    model = torch_fsdp.FullyShardedDataParallel(
        Stack(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=CPU, use_orig_params=True
    )
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
    for step in range(2):
        loss_of(run(batches(step)[dist.get_rank()])).backward()
        optim.step()
        optim.zero_grad()
    return run, optim


def _helpers_know_ours(compiles: bool) -> None:
    torch.manual_seed(0)
    with silenced():
        theirs, their_optim = _wrap_and_train(compiles=False)
        whole = helpers.StateDictOptions(full_state_dict=True)
        expected, expected_optim = helpers.get_state_dict(theirs, their_optim, options=whole)
    del theirs, their_optim
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adoption = fsdp_compile.adopt()
    with adoption:
        torch.manual_seed(0)
        ours, optim = _wrap_and_train(compiles)
        assert isinstance(getattr(ours, "_orig_mod", ours), OURS)
        sharded, sharded_optim = helpers.get_state_dict(ours, optim)
        assert all(isinstance(value, DTensor) for value in sharded.values())
        assert all(isinstance(state["exp_avg"], DTensor) for state in sharded_optim["state"].values())
        got, got_optim = helpers.get_state_dict(ours, optim, options=whole)
        assert list(got) == list(expected) == list(sharded) and not any(isinstance(v, DTensor) for v in got.values())
        torch.testing.assert_close(got, dict(expected), atol=1e-5, rtol=1e-4)
        assert set(got_optim["state"]) == set(expected_optim["state"]) == set(sharded_optim["state"])
        for name, state in expected_optim["state"].items():
            torch.testing.assert_close(got_optim["state"][name]["exp_avg"], state["exp_avg"], atol=1e-6, rtol=1e-4)

        for model_state, optim_state, options in (
            (sharded, sharded_optim, helpers.StateDictOptions()),
            (dict(expected), expected_optim, whole),  # torch's own, whole
        ):
            torch.manual_seed(1)
            again, again_optim = _wrap_and_train(compiles)
            helpers.set_state_dict(
                again, again_optim, model_state_dict=model_state, optim_state_dict=optim_state, options=options
            )
            now, now_optim = helpers.get_state_dict(again, again_optim, options=whole)
            torch.testing.assert_close(now, dict(expected), atol=1e-5, rtol=1e-4)
            for name, state in expected_optim["state"].items():
                torch.testing.assert_close(now_optim["state"][name]["exp_avg"], state["exp_avg"], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.more)])
def test_helpers_know_our_wrappers(two_ranks: Ranks, compiles: bool) -> None:
    two_ranks.run(_helpers_know_ours, compiles)


def _torchs_wrappers_stay() -> None:
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


def test_torchs_own_wrappers_stay_torchs(two_ranks: Ranks) -> None:
    two_ranks.run(_torchs_wrappers_stay)


@pytest.mark.more
def test_an_unchanged_fsdp1_script_trains_alike(tmp_path: Path) -> None:
    theirs = torchrun(str(WRAPPED_SCRIPT), "4", cwd=tmp_path)
    expected = [float(loss) for loss in line(theirs, "losses").split()[1:]]
    assert line(theirs, "engine").startswith("engine torch.distributed.fsdp.")
    for more in ([], ["compile"]):
        ours = torchrun("-m", "fsdp_compile.run", str(WRAPPED_SCRIPT), "4", *more, cwd=tmp_path)
        assert line(ours, "engine").startswith("engine fsdp_compile.fsdp1.")
        got = [float(loss) for loss in line(ours, "losses").split()[1:]]
        assert len(got) == 4 and got == pytest.approx(expected, abs=2e-5)
        assert line(ours, "graphs") == ("graphs 1 breaks 0" if more else "graphs 0 breaks 0")
        assert line(ours, "saved") == line(theirs, "saved")
