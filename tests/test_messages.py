"""Where torch's FSDP raises or warns, ours does, in words that contain torch's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.messages import FSDP1, FSDP2, MESSAGES, OURS, THEIRS, Api, Message

pytestmark = pytest.mark.usefixtures("fake_group_of_four")


def said(message: Message, api: Api) -> Any:
    """The exception, or the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            message.provoke(api)
        except Exception as error:
            if not issubclass(message.kind, Warning):
                return error
    if issubclass(message.kind, Warning):
        return next((one.message for one in caught if message.words in str(one.message)), [str(o.message) for o in caught])
    return None


@pytest.mark.parametrize("situation", [one.situation for one in MESSAGES])
def test_ours_says_what_torch_says(situation: str) -> None:
    (message,) = [one for one in MESSAGES if one.situation == situation]
    ours = said(message, OURS)
    assert isinstance(ours, message.kind), repr(ours)
    for word in (message.words, *message.says):
        assert word in str(ours), str(ours)
    theirs = said(message, THEIRS)
    assert type(theirs) is message.kind, repr(theirs)
    assert message.words in str(theirs), str(theirs)
