"""Trains a case on ranks that are there, and says where it differs from the unsharded module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fsdp_compile
from fsdp_compile import CPUOffloadPolicy, MixedPrecisionPolicy, configure, fully_shard
from fsdp_compile.workers import WorkerError
from tests import compiling  # noqa: F401  which registers the backend "passes"
from tests.comparing import full
from tests.fuzz.cases import Case, Step
from tests.fuzz.model import VOCAB, Fault, Model, Residual, unpacked
from tests.ranks import Ranks

LIMIT_S = 150.0
POLICIES = {
    "": MixedPrecisionPolicy(),
    "float32": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32),  # of a float64 module
    "reduce": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Crews:
    """This keeps a group of workers for each number of ranks, from one case to the next."""

    def __init__(self) -> None:
        self._of: dict[int, Ranks] = {}

    def trouble_with(self, case: Case) -> str:
        """What is wrong; nothing where all is well."""
        if case.ranks not in self._of:
            self._of[case.ranks] = Ranks(case.ranks)
        try:
            return next(filter(None, self._of[case.ranks].run(play, case, limit_s=LIMIT_S)), "")
        except WorkerError as error:
            return f"{error.summary}\n{error}"

    def stop(self) -> None:
        for ranks in self._of.values():
            ranks.stop()
        self._of.clear()


def check(crews: Crews, drawn: st.SearchStrategy[Case], num_cases: int, number: int | None = None) -> None:
    """Play cases, drawn from the seed of that number or always the same; of those that fail, raise for a small one."""

    @settings(
        max_examples=num_cases,
        derandomize=number is None,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(drawn)
    def plays(case: Case) -> None:
        trouble = crews.trouble_with(case)
        assert not trouble, f"python -m tests.fuzz {repr(case)!r}\n{trouble}"

    (plays if number is None else seed(number)(plays))()


def module_of(case: Case) -> Model:
    torch.manual_seed(7)
    model = Model(case)
    for param in model.parameters():
        if param.dim() == 1:  # biases of zero and weights of one would hide much
            with torch.no_grad():
                param.add_(torch.randn_like(param) / 4)
    # Norms of norms amplify the rounding of float32, so that two right models would differ after a step.
    mixes = any(one.double for block in case.blocks for one in (block, *block.inside))
    is_double = case.policy == "float32" or (case.policy == "" and not mixes)
    return model.double() if is_double else model


def mesh_of(case: Case) -> DeviceMesh:
    if case.replicas:
        return init_device_mesh("cpu", (2, case.ranks // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("shard",))


def shard(model: Model, case: Case) -> Any:
    mesh = mesh_of(case)
    shards = mesh.size(mesh.ndim - 1)

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.dim() == 2 and param.shape[1] % shards == 0 else None

    kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICIES[case.policy], "reshard_after_forward": case.reshard}
    if case.second_dim:
        kwargs["shard_placement_fn"] = place
    if case.offload:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    inner_first = [one for one in reversed(list(model.modules())) if isinstance(one, Residual) and one.said.unit]
    for one in inner_first:
        fully_shard(one, **kwargs)
    fully_shard(model, **kwargs)
    if case.once:
        configure(model, gather="once a step")
    return model


def compiled(model: Any, case: Case, mode: str) -> Callable[..., Any]:
    if mode in ("whole", "told to run eagerly", "one recompilation", "from a later step"):
        return torch.compile(model, backend=case.backend)
    if mode == "dynamic":
        return torch.compile(model, backend=case.backend, dynamic=True)
    if mode == "blocks":
        for block in dict.fromkeys(model.blocks):
            block.compile(backend=case.backend)
    run: Callable[..., Any] = model
    return run


def batch_of(step: int, micro: int, rank: int, said: Step) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    length = said.length + (rank % 2 if said.lengths_differ else 0)
    return torch.randint(0, VOCAB, (2, length), generator=generator)


def loss_of(output: Any) -> Tensor:
    return unpacked(output).double().pow(2).mean()


@contextlib.contextmanager
def faulty(model: Model, kind: str) -> Iterator[dict[str, Any]]:
    """A batch raises inside; the block yields what its forward is called with."""
    block = model.blocks[-1]
    block.raises_in = kind
    try:
        yield {"fault": len(model.blocks) // 2} if kind == "forward" else {}
    finally:
        block.raises_in = ""


def play(case: Case) -> str:
    """Train both on this rank, and say where they differ."""
    mode = case.modes[dist.get_rank()]
    reference, model = module_of(case), module_of(case)
    shard(model, case)
    run = compiled(model, case, mode)
    make = (
        (lambda params: torch.optim.Adam(params, lr=0.05, eps=0.1))
        if case.adam
        else (lambda params: torch.optim.SGD(params, lr=0.1))
    )
    optims = [make([one for one in which.parameters() if one.requires_grad]) for which in (model, reference)]
    within = 8e-2 if case.policy == "bfloat16" else 1e-4
    for number, said in enumerate(case.steps):
        eagerly = mode == ("told to run eagerly" if number else "from a later step")
        recompiles = torch._dynamo.config.patch(recompile_limit=64)  # ranks with other lengths would come to 8 alone
        if mode == "one recompilation":  # each length, and each mode of accumulation, is another graph
            recompiles = torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)
        with torch.compiler.set_stance("force_eager" if eagerly else "default"), recompiles:
            trouble = _step(case, number, said, reference, model, run, within)
        if trouble:
            return trouble
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=not said.keep)
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        if trouble := differs(f"parameter after steps: {name}", param, expected[name], within):
            return trouble
    kept = {name: full(value) for name, value in model.state_dict().items()}
    if list(kept) != list(reference.state_dict()):
        return f"state dict has other names: {list(kept)}, not {list(reference.state_dict())}"
    for name, value in reference.state_dict().items():
        if trouble := differs(f"state dict: {name}", kept[name], value, within):
            return trouble
    return ""


def _step(case: Case, number: int, said: Step, reference: Model, model: Any, run: Any, within: float) -> str:
    rank = dist.get_rank()
    if said.evaluate:
        with torch.no_grad():
            mine = batch_of(number, 9, rank, said)
            if trouble := differs(
                "output without gradients",
                unpacked(run(mine, step=number)),
                unpacked(reference(mine, step=number)),
                within,
            ):
                return trouble

    def train(micro: int, **kwargs: Any) -> Tensor:
        holds = said.how != "reduce each" and micro < said.micro - 1
        if said.how == "sync":
            model.set_requires_gradient_sync(not holds)
        with fsdp_compile.no_sync(model) if holds and said.how == "no_sync" else contextlib.nullcontext():
            loss = loss_of(run(batch_of(number, micro, rank, said), step=number, **kwargs))
            loss.backward()
        return loss

    # Ranks that run in other ways have launched other things when one raises.
    fault = said.fault if len(set(case.modes)) == 1 else ""
    for micro in range(said.micro):
        try:
            with faulty(model, fault if micro == 0 else "") as kwargs:
                loss = train(micro, **kwargs)
        except Fault:
            for param in (*model.parameters(), *reference.parameters()):
                param.grad = None
            loss = train(micro)
        expected = [
            loss_of(reference(batch_of(number, micro, one, said), step=number)) / case.ranks
            for one in range(case.ranks)
        ]
        torch.stack(expected).sum().backward()
        if trouble := differs("loss", loss, expected[rank] * case.ranks, within):
            return trouble
    theirs = dict(reference.named_parameters())
    ours = dict(model.named_parameters())
    if list(ours) != list(theirs):
        return f"parameters have other names: {list(ours)}, not {list(theirs)}"
    largest = max(float(one.grad.abs().max()) for one in theirs.values() if one.grad is not None)
    for name, param in ours.items():
        wanted = theirs[name].grad
        if param.grad is None or wanted is None:
            if not (param.grad is None and (wanted is None or not wanted.any())):
                return f"gradient is {'missing' if param.grad is None else 'there, and unsharded it is not'}: {name}"
        elif trouble := differs(f"gradient: {name}", param.grad, wanted, within, largest):
            return f"{trouble}\nin step {number}"
    return ""


def differs(what: str, ours: Tensor, theirs: Tensor, within: float, scale: float | None = None) -> str:
    ours, theirs = full(ours).detach().double(), theirs.detach().double()
    if ours.shape != theirs.shape:
        return f"{what} has another shape: {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    most = float((ours - theirs).abs().max()) if ours.numel() else 0.0
    scale = max(1e-3, scale if scale is not None else float(theirs.abs().max()) if theirs.numel() else 0.0)
    return "" if most <= within * scale else f"{what} differs by {most:.2g} of {scale:.2g}"
