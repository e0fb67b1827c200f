"""What people who move in get wrong at first: the exception says what to pass instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compile import MixedPrecisionPolicy, fully_shard, replicate
from fsdp_compile.fsdp1 import FullyShardedDataParallel, MixedPrecision

pytestmark = pytest.mark.usefixtures("fake_group_of_four")


@pytest.mark.parametrize("setting", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_a_dtype_by_name_is_refused_before_anything_is_sharded(api: Any, setting: str) -> None:
    model = nn.Linear(4, 4)
    by_name: dict[str, Any] = {setting: "bf16"}
    with pytest.raises(TypeError, match=rf"{api.__name__}.*{setting}='bf16'.*torch\.bfloat16"):
        api(model, mp_policy=MixedPrecisionPolicy(**by_name))
    assert type(model) is nn.Linear and not isinstance(model.weight, DTensor)
    as_dtype: dict[str, Any] = {setting: torch.bfloat16}
    api(model, mp_policy=MixedPrecisionPolicy(**as_dtype))
    assert isinstance(model.weight, DTensor)


@pytest.mark.parametrize("dims", ["dp", ("dp",)])
@pytest.mark.parametrize("api", [fully_shard, replicate])
def test_mesh_dimensions_by_name_are_refused_with_what_to_pass(api: Any, dims: Any) -> None:
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with pytest.raises(TypeError, match=r"dp_mesh_dims is .*'dp'.*DataParallelMeshDims\(shard="):
        api(model, mesh=mesh, dp_mesh_dims=dims)
    assert not isinstance(model.weight, DTensor)


@pytest.mark.parametrize("setting", ["param_dtype", "reduce_dtype", "buffer_dtype"])
def test_fsdp1_refuses_a_dtype_by_name(setting: str) -> None:
    model = nn.Linear(4, 4)
    by_name: dict[str, Any] = {setting: "bf16"}
    with pytest.raises(TypeError, match=rf"mixed_precision.*{setting}='bf16'.*torch\.bfloat16"):
        FullyShardedDataParallel(model, mixed_precision=MixedPrecision(**by_name))
    assert not isinstance(model.weight, DTensor)
