"""Which modules are wrapped: torch's policies by the names that ``torch.distributed.fsdp.wrap`` has for them.

They ask nothing of the class that wraps: ``enable_wrap(wrapper_cls=FullyShardedDataParallel)`` takes ours.
"""

from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy
from torch.distributed.fsdp.wrap import always_wrap_policy as always_wrap_policy
from torch.distributed.fsdp.wrap import enable_wrap as enable_wrap
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as size_based_auto_wrap_policy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as transformer_auto_wrap_policy
from torch.distributed.fsdp.wrap import wrap as wrap
