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
from torch.distributed.fsdp import fully_shard as TORCH_FULLY_SHARD

import fsdp_compile
from tests.comparing import train_and_compare
from tests.models import Stack, pair
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
if __name__ == "__main__":
    import beside
    assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
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


def test_a_script_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fsdp_compile.run import main

    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere.py")])
    assert "nowhere.py is not a file" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r"There is no module nowhere_at_all"):
        main(["-m", "nowhere_at_all"])
