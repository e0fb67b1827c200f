"""Fully sharded data parallelism that ``torch.compile`` sees: shard, compile, train."""

from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

from ._configure import configure as configure
from ._fully_shard import fully_shard as fully_shard
from ._graph_path import install_passes as install_passes
from ._inspect import inspect as inspect
from ._module import FSDPModule as FSDPModule
