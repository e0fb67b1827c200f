"""Where torch's FSDP raises or warns, ours does, in words that contain torch's."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.messages import MESSAGES, OURS, THEIRS, Api, Message

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
READ = (2, 15)  # the torch whose sentences were all read
NOT_RUN = Path(__file__).parent / "MESSAGES.md"


def said(message: Message, api: Api) -> Any:
    """The exception, or the warning; None where neither came."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            message.provoke(api)
        except Exception as error:
            if not issubclass(message.kind, Warning):
                return error
    texts = [one.message for one in caught if issubclass(message.kind, Warning)]
    return next((one for one in texts if message.words in str(one)), None)


@pytest.mark.parametrize("message", MESSAGES, ids=[one.situation for one in MESSAGES])
@pytest.mark.usefixtures("fake_group_of_four")
def test_ours_says_what_torch_says(message: Message) -> None:
    """The phrase, and the type or a subclass; ours names the parameter or unit, and what to do."""
    ours = said(message, OURS)
    assert isinstance(ours, message.kind), repr(ours)
    for word in (message.words, *message.says):
        assert word in str(ours)
    if message.since and VERSION < READ:
        return
    theirs = said(message, THEIRS)
    assert type(theirs) is message.kind, repr(theirs)
    assert message.words in str(theirs)


def _text(node: ast.expr, function: ast.AST) -> str:
    """The constant text of an expression. For a variable, it is the constant text that the function assigns to it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, function) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left, function) + _text(node.right, function)
    if not isinstance(node, ast.Name):
        return ""
    parts = []
    for put in ast.walk(function):
        if isinstance(put, (ast.Assign, ast.AugAssign)) and not isinstance(put.value, ast.Name):
            target = put.targets[0] if isinstance(put, ast.Assign) else put.target
            parts += [_text(put.value, ast.Module([], []))] * (isinstance(target, ast.Name) and target.id == node.id)
    return "".join(parts)


def _sentences(file: Path) -> Iterator[tuple[str, str]]:
    """(file and function, text) of what a module of torch's raises or warns of."""

    def visit(node: ast.AST, function: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inside, its = function, name
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = child if isinstance(child, ast.FunctionDef) else function
                its = f"{name}.{child.name}".lstrip(".")
            call = child.exc if isinstance(child, ast.Raise) else child
            if isinstance(call, ast.Call) and (call is not child or ast.unparse(call.func) in _SAYING):
                yield f"{file.name}::{its}", "".join(_text(one, function) for one in call.args)
            yield from visit(child, inside, its)

    tree = ast.parse(file.read_text())
    yield from visit(tree, tree, "")


_SAYING = ("warnings.warn", "logger.warning", "warning_once", "_p_assert")


@pytest.mark.skipif(VERSION != READ, reason="its sentences are read in one version")
def test_every_sentence_of_torchs_is_in_the_table() -> None:
    """What this version of torch raises and warns of in FSDP1 and FSDP2 has a row, or a reason; none is left over."""
    root = Path(dist.__file__).parent
    files = [*root.glob("fsdp/**/*.py"), *(root / "_composable" / f"{name}.py" for name in ("contract", "replicate_with_fsdp"))]
    all_said = [(where, " ".join(text.split())) for file in files for where, text in _sentences(file)]
    assert len(all_said) > 300
    not_run = re.findall(r"^\| (?:others of `(.*)`|(?!-|torch's phrase)(.*?)) \| .* \|$", NOT_RUN.read_text(), re.MULTILINE)
    places, others = ([one for one in column if one] for column in zip(*not_run))
    phrases = [*(one.words for one in MESSAGES if one.words), *others]
    missing = [
        one for one in all_said if not any(phrase in one[1] for phrase in phrases) and not one[0].startswith(tuple(places))
    ]
    assert missing == []
    unheard = [one for one in others if not any(one in text for _, text in all_said)]
    unheard += [one for one in places if not any(where.startswith(one) for where, _ in all_said)]
    assert unheard == []
