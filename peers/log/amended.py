"""Which amendment is in force at a log's end, and which one the next entry may take in."""

from __future__ import annotations

from peers.log.header import Header
from peers.values.amendments import Amendment


class Amended:
    """What a log's end says of the organiser's amendments. Part of `LogState`."""

    run: str
    organiser: str
    last: Header | None

    @property
    def amendment(self) -> Amendment | None:
        """The amendment that is in force in the present cycle; None: the manifest's values are."""
        return self.last.amendment if self.last else None

    def wrong_in_amendment(self, amendment: Amendment | None, closes: bool) -> str | None:
        """Return what is wrong with an amendment that the next entry would take in; None: nothing. It `closes` its
        cycle, or does not."""
        if amendment is None:
            return None
        if not closes:
            return "only the entry that closes a cycle takes in an amendment"
        if self.amendment and amendment.number <= self.amendment.number:
            return f"amendment {amendment.number} does not come after {self.amendment.number}, which is in force"
        if not amendment.is_signed(self.run, self.organiser):
            return f"amendment {amendment.number} is not signed by the run's organiser"
        return None

    def taken_in(self, header: Header) -> Amendment | None:
        """Return the amendment that the next entry, which this is, takes in."""
        return header.amendment if header.amendment != self.amendment else None

    def is_truly_amended(self, header: Header) -> bool:
        """Return whether the organiser has signed the amendment that a header names, if it names one. An entry that is
        taken on trust shows no more."""
        return header.amendment is None or header.amendment.is_signed(self.run, self.organiser)
