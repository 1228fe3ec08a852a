"""Step boundary: the training thread adopts the fragments that have arrived and captures those that are called for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..common.config import RunSettings
from ..common.fragments import Plan
from ..common.wire import Call
from .counters import Counters, Counts
from .mailbox import Arrival, Capture, Joined, Mailbox
from .public_model import PublicFragment
from .replica import Replica


class ModelExchange:
    """Exchange between one learner's model and the mailbox, with its counters. Only the training thread uses it."""

    def __init__(self, mailbox: Mailbox, joined: Joined, replica: Replica, counters: Counters) -> None:
        self.plan: Plan = joined.plan
        self.settings: RunSettings = joined.settings
        self.replica, self.counters = replica, counters
        self.public: list[PublicFragment] = list(joined.public)
        """The public fragments that were adopted last: the anchors of the deltas."""
        self.reported: tuple[int, tuple[int, ...]] = (joined.epoch, ())
        """(epoch, adopted versions under it), as Alive reports them."""
        self._mailbox = mailbox
        self._captures: dict[int, Capture] = {}
        """The last capture of each fragment, kept where a rebase needs it."""

    def begin(self, joined: Joined, keep: Collection[str] = ()) -> list[str]:
        """Write the run's model into this one: the static values, except for the names in `keep`, and every fragment.
        Returns the names of the static tensors that held other values before.
        """
        replaced = self.replica.load_static(joined.static, keep)
        self._take([Arrival(p, joined.epoch, public) for p, public in enumerate(joined.public)], "overwrite")
        return replaced

    def adopt(self, arrivals: Sequence[Arrival], *, reset: bool) -> None:
        """Adopt the arrivals by the run's rule; with `reset` keep none of the learner's own progress."""
        if arrivals:
            self._take(arrivals, "overwrite" if reset else self.settings.adopt)
        if reset:
            self._captures.clear()

    def conclude(self, final: Sequence[PublicFragment]) -> None:
        """Write the final model into this one."""
        for fragment, public in zip(self.plan.fragments, final, strict=True):
            self.replica.overwrite(fragment, public.vector)
        self.public = list(final)

    def answer(self, calls: Sequence[Call]) -> list[Call]:
        """Capture the fragment of each call that may be answered now. Returns these calls."""
        wanted = [call for call in calls if self.counters.may_answer(call)]
        for call in wanted:
            self._capture(call)
        return wanted

    def _take(self, arrivals: Sequence[Arrival], how: str) -> None:
        for arrival in arrivals:
            since = self._write(arrival, how)
            self.public[arrival.fragment] = arrival.public
            self.counters.adopted(arrival.fragment, arrival.epoch, arrival.public.version, since)
        epoch = arrivals[-1].epoch
        self.reported = (epoch, self.counters.versions(epoch))

    def _write(self, arrival: Arrival, how: str) -> Counts | None:
        """Write one fragment. Returns the counters since which the learner's own progress was kept, if it was."""
        fragment, vector = self.plan.fragments[arrival.fragment], arrival.public.vector
        capture = self._captures.pop(arrival.fragment, None)
        if how == "rebase" and capture is not None and arrival.own == capture.until:
            self.replica.rebase(fragment, vector, capture.theta)
            return capture.until
        if how == "mix":
            self.replica.mix(fragment, vector, self.settings.mix_alpha)
        else:
            self.replica.overwrite(fragment, vector)
        return None

    def _capture(self, call: Call) -> None:
        fragment, public = self.plan.fragments[call.fragment], self.public[call.fragment]
        theta = self._mailbox.spare_buffer(fragment.length, keep=self.settings.overlap + 1)
        if theta is None:
            theta = self.replica.new_buffer(fragment.length)
        ready = self.replica.capture(fragment, theta)
        since, until = self.counters.captured(call)
        rebase = self.settings.adopt == "rebase"
        capture = Capture(call, public.version, public.vector, theta, since, until, ready, reusable=not rebase)
        if rebase:
            self._captures[call.fragment] = capture
        self._mailbox.put_capture(capture)
