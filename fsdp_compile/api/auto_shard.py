"""Chooses by a policy which modules become units, in place of a loop of calls.

    auto_shard(model, Block)              fully_shard(model.layers[0]); fully_shard(model.layers[1]); fully_shard(model)
    auto_shard(model, options_of)         the same with options for each: what options_of(module) returns
    auto_shard(model, 100_000_000)        inner modules first, each that has so many elements outside of units inside it
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from .._torch_compat import fsdp1
from ..core.unit import original_class, unit_of
from .arguments import ignored_in
from .fully_shard import fully_shard

ModelT = TypeVar("ModelT", bound=nn.Module)
Options = dict[str, Any]
Chosen = dict[nn.Module, Options]

_KNOWN_OPTIONS = sorted(set(inspect.signature(fully_shard).parameters) - {"module"})


def auto_shard(model: ModelT, policy: Any = None, **options: Any) -> ModelT:
    """Call ``fully_shard`` on the modules inside ``model`` that ``policy`` chooses, and on ``model``; return it.

    **policy** is a class of modules, its name, or several of these; or a function that takes a module and returns
    whether to shard it by itself, or a dict of options for it that override **options**; or the number of elements from
    which a module becomes a unit; or a policy of ``torch.distributed.fsdp.wrap``. The default is the classes that the
    model lists in ``_no_split_modules``, as Hugging Face models do.

    **options** are ``fully_shard``'s. Modules that were sharded before stay as they are. With ``param_dtype`` in
    ``mp_policy``, batch norms become units of their own that compute in the dtype in which they are stored: their
    running statistics are not cast.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"auto_shard takes a module, but got {type(model).__name__}.")
    ignored = ignored_in("auto_shard", options.get("ignored_params"))
    unknown = sorted(set(options).difference(_KNOWN_OPTIONS))
    if unknown:
        raise TypeError(f"auto_shard: no option {', '.join(unknown)}. fully_shard takes {', '.join(_KNOWN_OPTIONS)}.")
    chosen = _choose(model, policy, ignored, options)
    chosen.pop(model, None)
    _require_units(model, chosen)
    if not any(_has_params(one) for one in chosen) and _classes_in(model):
        warnings.warn(
            f"auto_shard: policy chose nothing with parameters inside {original_class(model).__name__}, which is "
            f"gathered all at once. To have units, choose from: {_classes_in(model)}.",
            stacklevel=2,
        )
    chosen.update(_norms_in_full_precision(model, chosen, options))
    for module in inside_out(model):
        if module in chosen and unit_of(module) is None and _has_params(module):
            fully_shard(module, **chosen[module])
    return fully_shard(model, **options)


def _has_params(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _require_units(model: nn.Module, chosen: Chosen) -> None:
    """Raise for unknown options and modules that cannot be units, before anything is sharded."""
    for path, module in model.named_modules():
        here = path or f"the {original_class(model).__name__} itself"
        unknown = sorted(set(chosen.get(module, ())).difference(_KNOWN_OPTIONS))
        if unknown:
            raise ValueError(
                f"auto_shard: policy returned {', '.join(unknown)} for {here}. fully_shard takes "
                f"{', '.join(_KNOWN_OPTIONS)}."
            )
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not _can_be_a_unit(module)
        if (module in chosen or module is model) and is_list and _has_params(module):
            raise ValueError(
                f"auto_shard: {here} is a {original_class(module).__name__}, which has no forward to gather for. "
                f"Choose what stands in it: {_classes_in(module)}."
            )


def _norms_in_full_precision(model: nn.Module, chosen: Chosen, options: Options) -> Chosen:
    """Return the batch norms inside units that cast their parameters, with these units' options but without casts."""
    classes = fsdp1.classes_in_full_precision(MixedPrecision())
    norms: Chosen = {}

    def visit(module: nn.Module, around: Options) -> None:
        around = {} if unit_of(module) is not None else chosen.get(module, around)
        mp_policy = around.get("mp_policy")
        if isinstance(module, classes) and mp_policy is not None and mp_policy.param_dtype is not None:
            exact = MixedPrecisionPolicy(reduce_dtype=mp_policy.reduce_dtype, cast_forward_inputs=False)
            norms[module] = {**around, "mp_policy": exact}
        for child in module.children():
            visit(child, around)

    visit(model, options)
    norms.pop(model, None)
    return norms


def _choose(model: nn.Module, policy: Any, ignored: set[Any], options: Options) -> Chosen:
    if policy is None:
        policy = _not_to_be_split(model)
    if fsdp1.is_policy(policy):
        return fsdp1.chosen_by_policy(policy, model, set(), options)
    if isinstance(policy, int) and not isinstance(policy, bool):
        return _by_size(model, policy, ignored, options)
    if isinstance(policy, nn.Module):
        raise TypeError(
            f"auto_shard: policy is a {original_class(policy).__name__} module itself. Pass its class, or call "
            "fully_shard on it."
        )
    if isinstance(policy, (str, type, Iterable)):
        return _by_class(model, (policy,) if isinstance(policy, (str, type)) else tuple(policy), options)
    if not callable(policy):
        raise TypeError(
            f"auto_shard: policy is a {type(policy).__name__}. Pass classes of modules or their names, a function of a "
            "module, or a number of elements."
        )
    if "recurse" in _parameters_of(policy):
        found: Chosen = {}
        ask_from_root_down(model, policy, ignored, (), options, found)
        return found
    return _by_function(model, policy, options)


def _parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # a function written in C
        return ()


def _not_to_be_split(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the classes that models inside ``model`` list in ``_no_split_modules``."""
    by_module = [getattr(one, "_no_split_modules", None) or () for one in model.modules()]
    said = {name for names in by_module for name in ((names,) if isinstance(names, str) else names)}
    if not said:
        classes = _classes_in(model)
        remedy = f"Pass the class of its blocks: {classes}." if classes else "It has no blocks: call fully_shard on it."
        raise ValueError(
            f"auto_shard: {original_class(model).__name__} has no _no_split_modules that say what to shard. {remedy}"
        )
    # A model lists the classes of all its variants.
    present = {original_class(one).__name__ for one in model.modules()}
    if not said & present:
        raise ValueError(
            f"auto_shard: no module in {original_class(model).__name__} is one of {', '.join(sorted(said))}, which its "
            f"_no_split_modules say to shard. Pass the class of its blocks: {_classes_in(model)}."
        )
    return tuple(sorted(said & present))


def _by_class(model: nn.Module, classes: tuple[Any, ...], options: Options) -> Chosen:
    for one in classes:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(f"auto_shard: {one!r} in policy is no class of modules, and no name of one.")
    chosen: Chosen = {}
    for one in classes:
        of_class = [module for module in model.modules() if _is_a(module, one)]
        if not of_class:
            name = one if isinstance(one, str) else one.__name__
            raise ValueError(
                f"auto_shard: no module in {original_class(model).__name__} is a {name}. It has: "
                f"{_classes_in(model) or 'nothing'}."
            )
        chosen.update(dict.fromkeys(of_class, options))
    return chosen


def _is_a(module: nn.Module, cls: type | str) -> bool:
    return isinstance(module, cls) if isinstance(cls, type) else original_class(module).__name__ == cls


def _classes_in(model: nn.Module) -> str:
    names = {original_class(one).__name__ for one in model.modules() if one is not model and _can_be_a_unit(one)}
    return ", ".join(sorted(names))


def _by_size(model: nn.Module, least: int, ignored: set[Any], options: Options) -> Chosen:
    if least <= 0:
        raise ValueError(f"auto_shard: policy={least} is a number of elements, and has to be positive.")
    chosen: Chosen = {}
    taken: set[Any] = set(ignored)
    for module in inside_out(model):
        own = {param for param in module.parameters() if param not in taken}
        if module is not model and _can_be_a_unit(module) and sum(param.numel() for param in own) >= least:
            chosen[module] = options
            taken |= own
    return chosen


def _by_function(model: nn.Module, policy: Callable[[nn.Module], Any], options: Options) -> Chosen:
    chosen: Chosen = {}
    for path, module in model.named_modules():
        said = policy(module) if module is not model else None
        if not isinstance(said, (bool, dict, type(None))):
            raise TypeError(
                f"auto_shard: policy returned a {type(said).__name__} for {path}. Return whether to shard it, or a "
                "dict of options for it."
            )
        if said is True or isinstance(said, dict):
            chosen[module] = {**options, **(said if isinstance(said, dict) else {})}
    return chosen


def ask_from_root_down(
    module: nn.Module,
    policy: Callable[..., Any],
    ignored_params: Collection[Any],
    ignored_modules: Collection[nn.Module],
    options: Options,
    chosen: Chosen,
    is_root: bool = True,
) -> int:
    """Put what an FSDP1 policy function chooses in ``module`` into ``chosen``; return the number of its elements.

    The function is asked from the root down, with ``recurse=True``, whether to look inside, and on the way up whether
    to wrap.
    """
    numel = sum(param.numel() for param in module.parameters() if param not in ignored_params)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(
        ask_from_root_down(child, policy, ignored_params, ignored_modules, options, chosen, is_root=False)
        for child in module.children()
        if child not in ignored_modules
    )
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        chosen[module] = dict(options)
        return numel
    return wrapped


def _can_be_a_unit(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and _has_params(module)


def inside_out(model: nn.Module) -> Iterator[nn.Module]:
    """Yield every module once, after the modules inside it, even if these are elsewhere in the model as well."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                yield from visit(child)
        yield module

    yield from visit(model)
