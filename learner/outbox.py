"""Outbox of a learner: its encoded deltas, each kept until its call closes, and resent unchanged if needed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..common.codec import encode_delta
from ..common.fragments import Fragment
from ..common.wire import Call, Delta, split
from .identity import Identity
from .mailbox import Capture
from .replica import anchor, close_holes

RESEND_SECONDS = 1.0
"""Wait before an answer that the syncer does not list as received is sent again; doubled each time."""
LONGEST_RESEND_SECONDS = 16.0


@dataclass
class EncodedDelta:
    """The chunks of one encoded delta, and when they were last sent."""

    call: Call
    deltas: list[Delta]
    sent_at: float | None = None
    """None while it still waits to be sent."""
    wait_seconds: float = RESEND_SECONDS


def encode_answer(me: Identity, fragment: Fragment, codec: str, capture: Capture) -> list[Delta]:
    """Wait for the capture's copy, and encode its delta in chunks. Malformed ("nonfinite") if a value is not finite."""
    for event in capture.ready:
        event.synchronize()
    call, theta = capture.call, capture.theta[: fragment.length]
    close_holes(fragment, theta)
    payload = encode_delta(codec, anchor(fragment, capture.public), theta)
    return [
        Delta(
            run=me.run, name=me.name, incarnation=me.incarnation, epoch=call.epoch, slot=call.slot,
            attempt=call.attempt, fragment=call.fragment, base_version=capture.base_version,
            tokens_from=capture.since.tokens, tokens_to=capture.until.tokens,
            steps_from=capture.since.steps, steps_to=capture.until.steps, codec=codec, **part,
        )
        for part in split(payload.numpy().data)
    ]  # fmt: skip


class Outbox:
    """Open calls under the newest epoch, and the answers to them."""

    def __init__(self, me: Identity) -> None:
        self.name = me.name
        self.calls: dict[int, Call] = {}
        """By slot."""
        self._kept: dict[int, EncodedDelta] = {}

    def add_call(self, call: Call) -> None:
        known = self.calls.get(call.slot)
        if known is None or known.attempt <= call.attempt:
            self.calls[call.slot] = call

    def update_open_calls(self, calls: Iterable[Call], now: float) -> Iterator[EncodedDelta]:
        """Take all open calls from a Beat. Yields the answers to send again."""
        self.calls = {call.slot: call for call in calls}
        for slot in [slot for slot in self._kept if not self._open(slot)]:
            del self._kept[slot]
        for slot, answer in self._kept.items():
            late = answer.sent_at is not None and now - answer.sent_at > answer.wait_seconds
            if late and self.name not in self.calls[slot].received:
                answer.sent_at = None
                answer.wait_seconds = min(LONGEST_RESEND_SECONDS, 2 * answer.wait_seconds)
                yield answer

    def wanted(self, call: Call) -> bool:
        """Whether the call is still open, in this attempt."""
        known = self.calls.get(call.slot)
        return known is not None and (known.epoch, known.attempt) == (call.epoch, call.attempt)

    def keep(self, answer: EncodedDelta) -> None:
        """Keep an answer; it replaces one to an earlier attempt."""
        self._kept[answer.call.slot] = answer

    def keeps(self, slot: int, attempt: int) -> bool:
        """Whether the answer to this attempt is still kept."""
        return slot in self._kept and self._kept[slot].call.attempt == attempt

    def sent(self, slot: int, attempt: int, now: float) -> None:
        """The last chunk of this answer was sent."""
        if self.keeps(slot, attempt):
            self._kept[slot].sent_at = now

    @property
    def unconfirmed(self) -> int:
        """Number of answers to open calls that no Beat has listed as received."""
        return sum(self.name not in self.calls[slot].received for slot in self._kept if slot in self.calls)

    def drop(self) -> None:
        """Forget all calls and answers (another epoch, a reset)."""
        self.calls.clear()
        self._kept.clear()

    def _open(self, slot: int) -> bool:
        return slot in self.calls and self.calls[slot].attempt == self._kept[slot].call.attempt
