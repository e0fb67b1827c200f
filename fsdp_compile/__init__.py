"""Fully sharded data parallelism that ``torch.compile`` sees: shard, compile, train."""

from importlib.metadata import version as _version

from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

from ._torch_compat.fsdp2 import DataParallelMeshDims as DataParallelMeshDims
from .adoption import Adoption as Adoption
from .adoption import adopt as adopt
from .api.auto_shard import auto_shard as auto_shard
from .api.checked_reader import CheckedReader as CheckedReader
from .api.clip import clip_grad_norm_ as clip_grad_norm_
from .api.configure import configure as configure
from .api.fsdp2_view import GradientReductionHandle as GradientReductionHandle
from .api.fsdp2_view import UnshardHandle as UnshardHandle
from .api.full_params import full_params as full_params
from .api.fully_shard import fully_shard as fully_shard
from .api.fully_shard import replicate as replicate
from .api.initialize import cast_buffers as cast_buffers
from .api.initialize import materialize as materialize
from .api.initialize import sync_module_states as sync_module_states
from .api.module import FSDPModule as FSDPModule
from .api.module import no_sync as no_sync
from .api.module import share_comm_ctx as share_comm_ctx
from .api.stream import load_full_params as load_full_params
from .api.stream import stream_full_params as stream_full_params
from .api.unit_forward import register_fsdp_forward_method as register_fsdp_forward_method
from .core.mesh import ShardPlacementResult as ShardPlacementResult
from .graph.install import install_passes as install_passes
from .hugging_face.load import load_pretrained as load_pretrained
from .hugging_face.save import save_pretrained as save_pretrained
from .lookout.lookout import RanksParted as RanksParted
from .profiling.session import Profile as Profile
from .profiling.session import profile as profile
from .profiling.summary import Summary as Summary
from .tools.breaks import BreakReport as BreakReport
from .tools.breaks import GraphBreak as GraphBreak
from .tools.breaks import explain_breaks as explain_breaks
from .tools.explain import explain as explain
from .tools.explained import ExplainedBucket as ExplainedBucket
from .tools.explained import ExplainedMemory as ExplainedMemory
from .tools.explained import ExplainedParameter as ExplainedParameter
from .tools.explained import ExplainedStep as ExplainedStep
from .tools.explained import Explanation as Explanation
from .tools.inspect import Report as Report
from .tools.inspect import inspect as inspect
from .tools.logs import start_logging_as_environment_says as _start_logging
from .tools.parity import Parity as Parity
from .tools.parity import check_parity as check_parity
from .tools.planned import plan_of as plan_of

_start_logging()

__version__ = _version("fsdp-compile")
