"""Liveness of the syncer as a learner sees it: the age of the newest beat and of the last proof that the broker accepts
messages, what is logged about them, and when the learner is an orphan. No socket, no clock, no thread.
"""

from __future__ import annotations

from ..common.config import BEAT_SECONDS, SILENT_BEATS, LearnerConfig
from ..common.errors import Orphaned
from ..common.log import get_logger
from ..common.report_intervals import FIRST_SECONDS, Silence
from ..common.wire import Beat
from .alive_and_goodbye import orphaned
from .identity import Identity
from .mailbox import Mailbox

log = get_logger("learner")

PAUSE_SECONDS = 2.0
"""A longer interval between two ticks means that this process itself was suspended."""


class SyncerContact:
    """The newest beat and the time since. Times exclude intervals in which this process was suspended."""

    def __init__(self, config: LearnerConfig, me: Identity, mailbox: Mailbox) -> None:
        self.beat: Beat | None = None
        self._config, self._me, self._mailbox = config, me, mailbox
        self._beat_at = self._ticked_at = self._proven_at = 0.0
        self._no_beat, self._not_accepted = Silence(), Silence()

    def receive(self, beat: Beat, now: float) -> None:
        if self._no_beat.end():
            log.info("syncer_heard_again", learner=self._me.name, seconds=round(self.silent_seconds(now), 1))
        self.beat, self._beat_at = beat, now

    def silent_seconds(self, now: float) -> float:
        """Time since the newest beat."""
        return now - self._beat_at

    def is_live(self, now: float) -> bool:
        return self.silent_seconds(now) < SILENT_BEATS * BEAT_SECONDS

    def exclude_pause(self, now: float) -> None:
        """Call at each tick. While this process was stopped or swapped out, missing messages prove nothing."""
        if self._ticked_at and now - self._ticked_at > PAUSE_SECONDS:
            self._beat_at += now - self._ticked_at
            self._proven_at += now - self._ticked_at
        self._ticked_at = now

    def orphan_error(self, now: float) -> Orphaned | None:
        """The error to stop with, if no beat has come for the orphan timeout."""
        silent = self.silent_seconds(now)
        if self.beat is None or silent <= self._config.orphan_timeout_seconds:
            return None
        return Orphaned(orphaned(self._config, self.beat, silent, self._mailbox.refusal))

    def note_proof(self, now: float) -> None:
        """The broker accepts this learner's messages, or the join is not over and nothing is reported yet."""
        if self._not_accepted.end():
            log.info("broker_accepts_again", learner=self._me.name, seconds=round(now - self._proven_at, 1))
        self._proven_at = now

    def log_silence(self, now: float) -> None:
        """Log that no beat comes, or that the broker accepts no message: early, then at growing intervals."""
        silent = self.silent_seconds(now)
        if self._no_beat.report_due(silent):
            log.warning("syncer_silent", learner=self._me.name, seconds=round(silent, 1),
                        sentence=self._silence(silent))  # fmt: skip
        elif silent < FIRST_SECONDS and self._not_accepted.report_due(now - self._proven_at):
            seconds = now - self._proven_at
            why = self._mailbox.refusal or "is one of its ports blocked?"
            sentence = (
                f"beats of run {self._me.run} arrive, but the broker at {self._config.broker} has accepted no message "
                f"of {self._me.name} for {seconds:.0f} s: {why}"
            )
            log.warning("broker_accepts_nothing", learner=self._me.name, seconds=round(seconds, 1), sentence=sentence)

    def _silence(self, seconds: float) -> str:
        why = f" ({self._mailbox.refusal})" if self._mailbox.refusal else ""
        silence = f"no beat of run {self._me.run} has come from {self._config.broker} for {seconds:.0f} s{why}"
        if self._me.role != "learner":
            return f"{silence}; the model shown stays at its newest version and is updated once beats come again"
        limit = self._config.orphan_timeout_seconds
        return (
            f"{silence}; {self._me.name} continues training, sends once beats arrive again, and saves its parameters "
            f"and ends after {limit:g} s"
        )
