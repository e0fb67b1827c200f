"""FSDP1's API on this package's core: a script changes its imports, and compiles the model.

    from fsdp_compile.fsdp1 import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
    from fsdp_compile.fsdp1.wrap import ModuleWrapPolicy

    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    model = torch.compile(model)            # one forward graph, one backward graph

Enums, configurations and policies are torch's own.
"""

from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch
from torch.distributed.fsdp import CPUOffload as CPUOffload
from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
from torch.distributed.fsdp import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from torch.distributed.fsdp import LocalStateDictConfig as LocalStateDictConfig
from torch.distributed.fsdp import MixedPrecision as MixedPrecision
from torch.distributed.fsdp import OptimStateDictConfig as OptimStateDictConfig
from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType
from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import StateDictConfig as StateDictConfig
from torch.distributed.fsdp import StateDictSettings as StateDictSettings
from torch.distributed.fsdp import StateDictType as StateDictType

from .grad_scaler import ShardedGradScaler as ShardedGradScaler
from .wrapper import FullyShardedDataParallel as FullyShardedDataParallel
