"""Ranks that would issue different collectives are told so when they compile, not when they hang.

The first rank to plan a graph publishes the plan's digest in the store; the others compare. Nobody waits: one rank
alone may be recompiling, and a collective here would hang it.
"""

from __future__ import annotations

import hashlib

from . import _torch_compat as compat
from .plan import Plan


def agree(plan: Plan) -> None:
    """Publish the plan, or raise when another rank published a different one for the same parameters."""
    store = compat.default_store()
    if store is None:
        return
    fqns = sorted(fqn for bucket in (*plan.gathers, *plan.reduces) for fqn in bucket.fqns)
    graph_key = hashlib.sha256(repr((plan.stage, fqns)).encode()).hexdigest()[:16]
    try:
        published = store.compare_set(f"fsdp_compile/plan/{graph_key}", "", plan.to_json()).decode()
    except (RuntimeError, NotImplementedError):
        return  # a store that cannot compare and set (fake groups in tests)
    if published and published != plan.to_json():
        other = Plan.from_json(published)
        theirs, ours = {*other.gathers, *other.reduces}, {*plan.gathers, *plan.reduces}
        raise RuntimeError(
            f"this rank plans other collectives than the rank that compiled first, for one {plan.stage} graph: only "
            f"here {sorted(map(str, ours - theirs))}, only there {sorted(map(str, theirs - ours))}. Call fully_shard "
            "with the same arguments on every rank, and run the same versions of torch and fsdp_compile."
        )
