"""Choose what stays gathered until backward within a budget: as many of the last layers as save time and fit.

Where the step does not fit even with no layer kept, the forecast computes again all that a plan within a budget may.
Plans in between (some activations saved and others not, or layers kept beside recomputation) are not tried. A model
that compiles with the budget does find them, and is faster than the forecast.
"""

from __future__ import annotations

from .forecast import Forecast, Keeps, Planner, Whole, as_told, nothing


def forecast_of(planner: Planner) -> Forecast:
    """Forecast by the budget of the planner's configuration; without one, by the settings of the units."""
    budget = planner.configuration.budget
    if budget is None:
        whole, num_traced = planner.all_alike(as_told)
        return planner.forecast(whole, 0, num_traced)
    return planner.forecast(*min(_candidates(planner, budget), key=lambda found: _rank(found, budget)))


def _rank(candidate: tuple[Whole, int, int], budget: int) -> tuple[float, ...]:
    whole, num_kept, _ = candidate
    num_bytes = sum(whole.peak())
    if num_bytes <= budget:
        return 0, whole.seconds(), num_bytes
    return 1, num_bytes, num_kept, whole.seconds()  # over the budget: fewest bytes, then fewest layers kept


def _candidates(planner: Planner, budget: int) -> list[tuple[Whole, int, int]]:
    """Return the steps to choose from, with how many periods each keeps gathered, and how many were traced."""
    found: list[tuple[Whole, int, int]] = []
    for root in (as_told, nothing):
        if any(sum(whole.peak()) <= budget for whole, *_ in found):
            break  # parameters outside of the layers are read last, so they are the first to keep
        none, num_traced = planner.all_alike(planner.keeping(0, root))
        found.append((none, 0, num_traced))
        if planner.run is None:
            continue
        every, every_traced = planner.all_alike(planner.keeping(None, root))
        found.append((every, planner.num_periods, every_traced))
        if sum(none.peak()) <= budget < sum(every.peak()):
            most = _most_that_fit(planner, root, budget)
            for num_kept in {most, most // 2}:
                whole = planner.last_kept(num_kept, root)
                if whole is not None:
                    found.append((whole, num_kept, num_traced))
    if not any(sum(whole.peak()) <= budget for whole, *_ in found):
        lean, num_traced = planner.all_alike(nothing, is_lean=True)
        found.append((lean, 0, num_traced))
    return found


def _most_that_fit(planner: Planner, root: Keeps, budget: int) -> int:
    """Find by bisection how many of the last periods may stay gathered."""
    fits, over = 0, planner.num_periods
    while over - fits > 1:
        middle = (fits + over) // 2
        whole = planner.last_kept(middle, root)
        if whole is None:  # too few are kept, or too few are not, to see what repeats
            if middle < planner.num_periods // 2:
                return fits
            over = middle
        elif sum(whole.peak()) <= budget:
            fits = middle
        else:
            over = middle
    return fits
