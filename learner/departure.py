"""Departure of a learner: its goodbyes, the offer of its final buffers, and how long it waits for the syncer to take
its last answers and buffers. No socket, no clock, no thread.
"""

from __future__ import annotations

from ..common.codec import digest
from ..common.log import get_logger
from ..common.wire import Beat, Buffers, Goodbye, split
from .alive_and_goodbye import goodbye
from .identity import Identity
from .mailbox import Mailbox
from .outbox import LONGEST_RESEND_SECONDS, RESEND_SECONDS, Outbox
from .syncer_contact import SyncerContact

log = get_logger("learner")

GOODBYE_SECONDS = 1.0
"""Between two goodbyes of a learner that holds the final model."""
LEAVE_SECONDS = 5.0
"""How long a learner that leaves in mid-run waits until the syncer has its last answers."""
HURRY_SECONDS = 1.0
"""The same when it leaves because of an error or Ctrl-C."""
ABSENT_SECONDS = 1.0
"""The same when no broker listens."""
BUFFERS_SECONDS = 30.0
"""How long a learner that leaves after the end waits until the final model has the buffers of one learner."""


class Departure:
    """The end of one membership, from the final model or the script's close() on."""

    def __init__(self, me: Identity, mailbox: Mailbox, contact: SyncerContact, outbox: Outbox) -> None:
        self._me, self._mailbox, self._contact, self._outbox = me, mailbox, contact, outbox
        self._leaving_since: float | None = None
        self._goodbye_due = 0.0
        self._has_offered = self._has_warned = False
        self._buffers_due, self._buffers_wait = 0.0, RESEND_SECONDS
        """When the buffers are sent again if the syncer still requests them, and the last wait before that."""

    def after_the_end(self, model_hash: str, now: float) -> Goodbye | None:
        """The goodbye of a learner that holds the final model, if one is due: each second, and when it leaves."""
        reason, changed = self._mailbox.leaving, self._mailbox.static_changes
        is_news = changed is not None and bool(changed.count) and not self._has_offered
        if not (is_news or self._is_goodbye_due(now) or (reason and not self.awaits_buffers(now))):
            return None
        self._has_offered |= is_news
        unknown = 0 if reason else None
        buffers = unknown if changed is None else changed.count
        return goodbye(self._me, "finished", self._mailbox.status, model_hash, buffers)

    def in_mid_run(self, now: float, *, unsent: bool) -> Goodbye | None:
        """The goodbye of a learner that leaves: once the syncer has its last answers, or the time is up."""
        reason = self._mailbox.leaving
        if not reason:
            return None
        if now < self._deadline(now) and (unsent or (reason == "left" and self._outbox.unconfirmed > 0)):
            return None
        return goodbye(self._me, reason, self._mailbox.status, "")

    def gives_up(self, now: float, *, is_member: bool) -> bool:
        """No broker listens: whether a learner that leaves ends without a goodbye now."""
        if not self._mailbox.leaving or now < self._deadline(now, ABSENT_SECONDS):
            return False
        if is_member:
            log.warning("goodbye_not_sent", learner=self._me.name, answers_unconfirmed=self._outbox.unconfirmed)
        return True

    def buffers(self, beat: Beat, now: float) -> list[Buffers]:
        """The chunks of the static tensors that training has changed, if the syncer requests them from this learner;
        again if it still does some time later.
        """
        changed = self._mailbox.static_changes
        if changed is None or beat.buffers_held or beat.buffer_source != self._me.pair or now < self._buffers_due:
            return []
        self._buffers_wait = min(LONGEST_RESEND_SECONDS, 2 * self._buffers_wait)
        self._buffers_due = now + self._buffers_wait
        payload_digest, fragment = digest(changed.payload), len(beat.versions)
        return [
            Buffers(
                run=self._me.run, name=self._me.name, incarnation=self._me.incarnation, epoch=beat.epoch,
                fragment=fragment, digest=payload_digest, **part,
            )
            for part in split(changed.payload)
        ]  # fmt: skip

    def awaits_buffers(self, now: float) -> bool:
        """Whether the syncer may still request this learner's buffers, so that it does not leave yet."""
        changed, beat = self._mailbox.static_changes, self._contact.beat
        if changed is None or not changed.count or beat is None or (beat.state == "finished" and beat.buffers_held):
            return False
        self._leaving_since = now if self._leaving_since is None else self._leaving_since
        if self._contact.is_live(now) and now - self._leaving_since < BUFFERS_SECONDS:
            self._mailbox.progress_at = now
            return True
        if not self._has_warned:
            self._has_warned = True
            log.warning("buffers_not_taken", learner=self._me.name, tensors=changed.count)
        return False

    def _is_goodbye_due(self, now: float) -> bool:
        if now < self._goodbye_due:
            return False
        self._goodbye_due = now + GOODBYE_SECONDS
        return True

    def _deadline(self, now: float, most_seconds: float = LEAVE_SECONDS) -> float:
        if self._leaving_since is None:
            self._leaving_since = now
        patience = LEAVE_SECONDS if self._mailbox.leaving == "left" else HURRY_SECONDS
        return self._leaving_since + min(patience, most_seconds)
