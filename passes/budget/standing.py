"""What stands in memory throughout a step and may be on the host: an optimizer's states, and then layers' shards.

    budget   | peak of forward and backward        | states |    more states on the host
             | a lower peak             | states            |
             | a peak above the budget                  |        all states on the host, and some layers' shards

So a byte that the step saves is worth at least the seconds that a byte of these costs on the host. States leave first:
gathers wait for shards as well, and gradients follow them. Both are updated on the device (optim.StatesOnHost).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.profiles import HardwareProfile
from ..cost.roofline import copy_seconds


@dataclass(frozen=True)
class Standing:
    """The bytes that one rank may have on the host throughout a step, and the seconds which that costs."""

    profile: HardwareProfile
    states_bytes: int = 0
    shards_bytes: int = 0  # by which the peak falls if all shards are there that may be
    shards_s: float = 0.0  # by which forward, backward and the optimizer's step take longer then

    def states_away(self, peak_bytes: int, budget_bytes: int) -> int:
        """Return the bytes of states for which a step with this peak leaves no room."""
        return min(max(peak_bytes + self.states_bytes - budget_bytes, 0), self.states_bytes)

    def shards_away(self, peak_bytes: int, budget_bytes: int) -> int:
        """Return how many bytes of shards have to leave, so that a step with this peak is within the budget."""
        return min(max(peak_bytes - budget_bytes, 0), self.shards_bytes)

    def states_seconds(self, away_bytes: int) -> float:
        """Return for how long the optimizer's step waits: copies in both directions run beside one another."""
        return copy_seconds(away_bytes, self.profile) if away_bytes else 0.0

    def shards_seconds(self, away_bytes: int) -> float:
        """Return by how much a step is longer, if a share of the layers is as slow as all of them."""
        return self.shards_s * away_bytes / self.shards_bytes if away_bytes else 0.0

    def room_beside(self, worth: float) -> int:
        """Return the bytes of the budget that what is kept has to leave, if each of its bytes saves so many seconds.

        Less than nothing: shards leave for it.
        """
        if self.states_bytes and self.states_seconds(self.states_bytes) / self.states_bytes > worth:
            return self.states_bytes
        return -self.shards_bytes if self.shards_bytes and self.shards_s / self.shards_bytes <= worth else 0
