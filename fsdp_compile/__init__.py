"""Fully sharded data parallelism that ``torch.compile`` sees: shard, compile, train."""

from importlib.metadata import version as _version

from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

from ._accumulate import no_sync as no_sync
from ._adopt import Adoption as Adoption
from ._adopt import adopt as adopt
from ._breaks import BreakReport as BreakReport
from ._breaks import explain_breaks as explain_breaks
from ._configure import configure as configure
from ._fully_shard import fully_shard as fully_shard
from ._graph_path import install_passes as install_passes
from ._handles import UnshardHandle as UnshardHandle
from ._inspect import inspect as inspect
from ._mesh import ShardPlacementResult as ShardPlacementResult
from ._module import FSDPModule as FSDPModule
from ._module import register_fsdp_forward_method as register_fsdp_forward_method
from ._module import share_comm_ctx as share_comm_ctx
from ._parity import Parity as Parity
from ._parity import check_parity as check_parity
from ._replicate import replicate as replicate
from ._torch_compat import DataParallelMeshDims as DataParallelMeshDims

__version__ = _version("fsdp-compile")
