"""In how many outer steps' rosters peers have been, as far as that matters for their probation."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from peers.log.header import MEMBER_LIMIT, Tenure


def tenures_after(
    before: Sequence[Tenure], roster: Sequence[str], probation: int, excluded: Collection[str]
) -> tuple[Tenure, ...]:
    """Return the tenures after an entry with this roster; none where the run has no probation.

    Whoever founds the run has served. So has a roster of nobody but those on probation: it founds it anew. Peers that
    are excluded begin anew.
    """
    if not probation:
        return ()
    served = {tenure.peer: tenure.served for tenure in before}
    is_founding = all(served.get(peer, 0) < probation for peer in roster)
    present = {peer: probation if is_founding else min(probation, served.get(peer, 0) + 1) for peer in roster}
    absent = [tenure for tenure in before if tenure.peer not in present and tenure.peer not in excluded]
    absent.sort(key=lambda tenure: -tenure.served)  # of those who have served as long, the latest stay first
    return (*(Tenure(peer=peer, served=steps) for peer, steps in present.items()), *absent[:MEMBER_LIMIT])
