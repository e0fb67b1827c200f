"""A forward that leaves a unit out, as layer drop does: what was gathered ahead for it is not used after a step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import fully_shard
from tests.comparing import assert_same_params
from tests.models import Block
from tests.ranks import Ranks


class Dropping(nn.Module):
    """Blocks, of which a call may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number in left_out else layer(x)
        return x


def _trains(raises: bool) -> None:
    torch.manual_seed(0)
    unsharded = Dropping()
    model = copy.deepcopy(unsharded)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optims = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, unsharded)]
    for step, left_out in enumerate(((), (1,), (), (0, 1), ())):
        batch = torch.randn(dist.get_world_size(), 2, 8, generator=torch.Generator().manual_seed(step))
        if raises:
            with pytest.raises(RuntimeError):  # the first block has launched the gather of the second
                model(batch[0][:, :3])
        model(batch[dist.get_rank()], left_out).pow(2).sum().backward()
        torch.stack([unsharded(one, left_out).pow(2).sum() for one in batch]).mean().backward()
        for one, optim in zip((model, unsharded), optims):
            optim.step()
            optim.zero_grad()
            with torch.no_grad():
                for param in one.parameters():
                    param.mul_(0.9)  # what had no gradient decays as well
        assert_same_params(model, unsharded, atol=1e-5)


@pytest.mark.compat
@pytest.mark.parametrize("raises", [False, True])
def test_a_unit_that_did_not_run_is_gathered_anew(two_ranks: Ranks, raises: bool) -> None:
    two_ranks.run(_trains, raises)
