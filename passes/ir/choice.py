"""Why a plan keeps what it keeps: the memory budget, and the predicted time and memory of each candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """One choice of what to keep from forward to backward, and the predicted time and peak of a step with it."""

    name: str
    num_kept: int  # parameters
    peak_bytes: int
    seconds: float
    exposed_s: float  # part of ``seconds``: waiting for collectives
    num_recomputed: int = 0  # parameters whose products backward recomputes
    num_sliced: int = 0  # parameters of which a slice is kept


@dataclass(frozen=True)
class Choice:
    """What was chosen within a budget. It explains a plan and is no part of it: ranks may predict other figures."""

    budget_bytes: int
    profile: str  # name of the hardware profile
    rank: int  # the one that decided, by its own batch
    chosen: Candidate
    lost: tuple[Candidate, ...]

    @property
    def is_met(self) -> bool:
        return self.chosen.peak_bytes <= self.budget_bytes

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Choice:
        """Rebuild a choice from the fields that ``dataclasses.asdict`` returned."""
        lost = tuple(Candidate(**one) for one in fields["lost"])
        return cls(**{**fields, "chosen": Candidate(**fields["chosen"]), "lost": lost})

    def __str__(self) -> str:
        budget = f"budget {as_size(self.budget_bytes)}, predicted on {self.profile!r} by rank {self.rank}"
        rows = [("->", self.chosen), *(("  ", one) for one in self.lost)]
        width = max(len(one.name) for _, one in rows)

        def besides(one: Candidate) -> str:
            columns = ((one.num_sliced, "sliced"), (one.num_recomputed, "computed again"))
            shown = any(row.num_sliced for _, row in rows), any(row.num_recomputed for _, row in rows)
            return "".join(f"{count:>5} {what}  " for (count, what), is_shown in zip(columns, shown) if is_shown)

        return "\n".join(
            [
                budget + ("" if self.is_met else ", which nothing fits into"),
                *(
                    f"  {mark} {one.name:<{width}}  {one.num_kept:>5} kept  {besides(one)}"
                    f"peak {as_size(one.peak_bytes):>10}  "
                    f"{one.seconds * 1e3:.3f} ms, {one.exposed_s * 1e3:.3f} of them waiting"
                    + ("" if one.peak_bytes <= self.budget_bytes else "  (over the budget)")
                    for mark, one in rows
                ),
            ]
        )


def as_size(num_bytes: float) -> str:
    """Format bytes for people: 800.0 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
