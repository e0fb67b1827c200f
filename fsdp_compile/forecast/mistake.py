"""The error that tells a user what to change before there can be a plan."""

from __future__ import annotations


class Mistake(ValueError):
    """An error of one sentence that says what to change; messages of other software may follow on further lines."""
