"""Put the passes into the compiler's settings."""

from __future__ import annotations

from typing import Any

import torch

from .._torch_compat import dynamo, inductor
from ..passes import PassManager
from ..passes._torch_compat import CustomGraphPass
from ..passes.apply.keep import make_again

manager = PassManager()


def install_passes() -> None:
    """Put our passes into Inductor's and AOTAutograd's settings, beside what the user has there.

    Called by the first ``fully_shard``. Call it again after setting ``post_grad_custom_pre_pass``, or another of these
    settings, yourself: the pass that was set last replaces the others.
    """
    theirs = inductor.get_post_grad_pass()
    if not _has_ours(theirs):
        inductor.set_post_grad_pass(manager if theirs is None else ComposedPass(_as_tuple(theirs), manager))
    joint = inductor.get_joint_pass()
    if not isinstance(joint, JointPass):
        inductor.set_joint_pass(JointPass(joint))
    inductor.set_whole_pass(manager.whole)


class ComposedPass(inductor.InferenceAwareGraphPass):  # type: ignore[misc]
    """The user's passes, then ours."""

    def __init__(self, theirs: tuple[Any, ...], ours: PassManager) -> None:
        self.theirs = theirs
        self.ours = ours

    def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
        for one_pass in self.theirs:
            inductor.call_graph_pass(one_pass, graph, is_inference)
        self.ours(graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> ComposedPass:
        return self  # like the manager: Inductor copies the defaults of its settings

    def uuid(self) -> Any:
        """Return None, which means "do not cache", if one of the user's passes has no uuid."""
        uuids = [one_pass.uuid() if isinstance(one_pass, CustomGraphPass) else None for one_pass in self.theirs]
        return None if None in uuids else (*uuids, self.ours.uuid())


class JointPass:
    """The user's joint pass, if there is one, then ours."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        if self.theirs is not None:
            module = self.theirs(module, inputs)
        make_again(module.graph, dynamo.inputs_free_to_save(module.graph))
        return manager.joint(module, inputs)


def _has_ours(configured: Any) -> bool:
    return any(one_pass is manager or isinstance(one_pass, ComposedPass) for one_pass in _as_tuple(configured))


def _as_tuple(configured: Any) -> tuple[Any, ...]:
    if configured is None:
        return ()
    return tuple(configured) if isinstance(configured, (list, tuple)) else (configured,)
