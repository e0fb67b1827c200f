"""What a user has to change before there is a plan."""

from __future__ import annotations


class Mistake(ValueError):
    """One sentence that says what to change; what others said of it may stand in lines below."""
