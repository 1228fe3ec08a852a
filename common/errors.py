"""The tree of errors. Each says in one sentence what happened, to whom, and what to do.

DilocoError
├── SettingError       a setting, file or argument is wrong; found before anything starts     exit code 2
├── Refused            the syncer does not take this learner, and says why                    exit code 2
├── PeerLost           nobody answers at an address                                           exit code 3
├── Superseded         another syncer with a higher epoch serves this run                     exit code 4
├── Orphaned           no beat for --orphan-timeout; the learner has saved and stops          exit code 5
├── SaveFailed         the run ended, but its last checkpoint could not be written            exit code 6
├── Diverged           a learner's own loss or parameters are no longer finite                exit code 7
├── LimitReached       the system gives this process no more files, threads or processes      exit code 1
└── Malformed          a message or file is not what it says it is; counted, never fatal
"""

from __future__ import annotations

from .printable import printable


class DilocoError(Exception):
    """Root of all errors that this package raises on purpose. `exit_code` is what the command ends with."""

    exit_code = 1

    def __init__(self, *words: object) -> None:
        """The sentence is one line that can be printed, whatever was put into it: names, paths, causes."""
        super().__init__(*(printable(" ".join(w.splitlines())) if isinstance(w, str) else w for w in words))


class SettingError(DilocoError):
    """A setting, file or argument is wrong; nothing has started."""

    exit_code = 2


class Refused(DilocoError):
    """The syncer does not take this learner; the sentence names the first reason."""

    exit_code = 2


class PeerLost(DilocoError):
    """Nobody answers at an address."""

    exit_code = 3


class Superseded(DilocoError):
    """Another syncer with a higher epoch serves this run."""

    exit_code = 4


class Orphaned(DilocoError):
    """No beat was heard for the orphan time-out; the learner saved its parameters and stops."""

    exit_code = 5


class SaveFailed(DilocoError):
    """The run ended, but its last checkpoint could not be written."""

    exit_code = 6


class Diverged(DilocoError):
    """A learner's own loss or parameters are no longer finite, again after a reset from the global state; or what is
    merged is not, again and again.
    """

    exit_code = 7


class LimitReached(DilocoError):
    """The system gives this process no more open files, threads or processes; the sentence names the limit."""


class Malformed(DilocoError):
    """A message or file is not what it says it is. `reason` is a short word that counters and logs carry."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
