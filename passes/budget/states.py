"""An optimizer's states within a budget: they are on the device as far as the step leaves room, and else on the host.

    budget   | peak of forward and backward | states |    states on the host
             | a lower peak       | states           |

So a byte that the step saves is worth at least the seconds for which a byte of states is copied there and back.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.profiles import HardwareProfile
from ..cost.roofline import copy_seconds


@dataclass(frozen=True)
class States:
    """The states of one rank, and what a step costs where some are on the host."""

    num_bytes: int
    profile: HardwareProfile

    def away(self, peak_bytes: int, budget_bytes: int) -> int:
        """Return the bytes of states for which a step with this peak leaves no room."""
        return min(max(peak_bytes + self.num_bytes - budget_bytes, 0), self.num_bytes)

    def seconds(self, away_bytes: int) -> float:
        """Return for how long the optimizer's step waits: copies in both directions run beside one another."""
        return copy_seconds(away_bytes, self.profile) if away_bytes else 0.0

    @property
    def seconds_a_byte(self) -> float:
        return self.seconds(self.num_bytes) / self.num_bytes if self.num_bytes else 0.0
