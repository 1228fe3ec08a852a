"""Exception hierarchy. Each message is one sentence: what happened, to which part, and what to do.

DilocoError
├── SettingError       invalid setting, file or argument, found before anything starts        exit code 2
├── Refused            the syncer rejects this learner and gives the reason                   exit code 2
├── PeerLost           no answer from broker, syncer or Redis                                 exit code 3
├── Superseded         another syncer with a higher epoch serves this run                     exit code 4
├── Orphaned           no beat for --orphan-timeout; the learner has saved and stops          exit code 5
├── SaveFailed         the run ended, but its last checkpoint could not be written            exit code 6
├── Diverged           a learner's loss or parameters, or the merged model, are not finite    exit code 7
├── LimitReached       an operating-system limit on files, threads or processes is reached    exit code 1
└── Malformed          invalid message or file: counted and dropped, never fatal
"""

from __future__ import annotations

from .printable import printable


class DilocoError(Exception):
    """Base class of all errors that this package raises on purpose. `exit_code` is the exit code of the command."""

    exit_code = 1

    def __init__(self, *words: object) -> None:
        """The message becomes one printable line, whatever names, paths and causes are part of it."""
        super().__init__(*(printable(" ".join(w.splitlines())) if isinstance(w, str) else w for w in words))


class SettingError(DilocoError):
    """Invalid setting, file or argument; nothing has started."""

    exit_code = 2


class Refused(DilocoError):
    """The syncer rejects this learner; the message gives the first reason."""

    exit_code = 2


class PeerLost(DilocoError):
    """No answer from the broker, the syncer or Redis."""

    exit_code = 3


class Superseded(DilocoError):
    """Another syncer with a higher epoch serves this run."""

    exit_code = 4


class Orphaned(DilocoError):
    """No beat arrived for the orphan timeout; the learner has saved its parameters and stops."""

    exit_code = 5


class SaveFailed(DilocoError):
    """The run ended, but its last checkpoint could not be written."""

    exit_code = 6


class Diverged(DilocoError):
    """A learner's loss or parameters are not finite, even after a reset to the global model; or the merged model is
    repeatedly not finite.
    """

    exit_code = 7


class LimitReached(DilocoError):
    """The operating system allows no more open files, threads or processes; the message names the limit."""


class Malformed(DilocoError):
    """Invalid message or file. `reason` is a short word for counters and logs."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
