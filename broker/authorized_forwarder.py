"""A plane where everybody has a key: each message and each subscription is checked against who sent it.

libzmq tells who sent a frame (`User-Id`: the public half of his key, proven in the handshake) and leaves it to us, by
XPUB_MANUAL, which subscriptions to admit.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq

from ..common.config import MESSAGE_BYTES
from ..common.log import get_logger
from ..common.sockets import SUBSCRIBE, UNSUBSCRIBE
from ..common.wire import Plane
from .acl import PING, PREFIX_BYTES, REFUSALS, SUBSCRIPTIONS_SECONDS, AccessControl, RateLimit, Rule, Subscriptions
from .forwarder import BATCH, Forwarder, OpenPair

log = get_logger("broker")


class AuthorizedForwarder(Forwarder):
    """Passes on what `gate` lets through. `bar` is called, from this thread, with a key that has to be shut out."""

    def __init__(
        self,
        plane: Plane,
        open_pair: OpenPair,
        on_failure: Callable[[], object],
        gate: AccessControl,
        bar: Callable[[str, str], object],
    ) -> None:
        super().__init__(plane, open_pair, on_failure)
        self.gate = gate
        self.offenders: Counter[str] = Counter()
        """Messages and subscriptions refused, by the key of which they came."""
        self._bar = bar
        self._allowance = RateLimit() if plane is Plane.CONTROL else None
        self._table, self._opened_at = Subscriptions(), time.monotonic()
        self._pings = self._spoken = 0

    def in_use(self) -> bool:
        """Also if somebody spoke since the last call: who closes connections in odd ways can miscount subscriptions."""
        before, self._spoken = self._spoken, self.messages - self._pings
        used = super().in_use()
        return used or self._spoken > before

    def _reopen(self) -> None:
        self._table, self._opened_at = Subscriptions(), time.monotonic()
        super()._reopen()

    def _take_subscriptions(self) -> None:
        with contextlib.suppress(zmq.Again):  # none waits
            for _ in range(BATCH):
                frame = self._sink.recv(zmq.NOBLOCK, copy=False)
                octets, user = frame.bytes, user_of(frame)
                if len(octets) > 1 + PREFIX_BYTES:
                    self._shut_out(user, "sent a subscription that no topic begins with")
                elif octets[:1] == SUBSCRIBE:
                    self._admit(user, octets[1:])
                elif octets[:1] == UNSUBSCRIBE:
                    self._sink.setsockopt(zmq.UNSUBSCRIBE, octets[1:])
                    self._table.take_back(octets[1:])
                else:
                    # libzmq counts such a frame out of step with those who sent the next ones: a subscription admitted
                    # after it would be another peer's. No client of ours sends one.
                    self._shut_out(user, "sent what is no subscription")
                if self._anew:
                    break
        self.subscriptions, self.listening = len(self._table.live), self._table.others

    def _admit(self, user: str | None, prefix: bytes) -> None:
        if user is None:
            return
        if self._table.full(user) and time.monotonic() - self._opened_at > SUBSCRIPTIONS_SECONDS:
            self._anew = True
            return
        rule = self.gate.rule(user)
        if self._table.ask(user, prefix, rule):
            self._sink.setsockopt(zmq.SUBSCRIBE, prefix)
            self.visited |= not PING.match(prefix)
            return
        self.dropped["subscription"] += 1
        if rule is not None:
            self.offenders[str(rule.grant)] += 1
        if self._table.refusals[user] >= REFUSALS:
            self._shut_out(user, f"asked {REFUSALS} times for what it may not hear")

    def _shut_out(self, user: str | None, why: str) -> None:
        """Bar the key, and cut every connection before anything else is read from this one."""
        self._anew = True
        if user is not None:
            self._bar(user, why)

    def _forward_some(self) -> None:
        """As in an open plane, each message by the key of which it came."""
        receive = self._source.recv
        rule_of, refusal = self.gate.rule, self.gate.refusal
        with contextlib.suppress(zmq.Again):  # nothing waits any more
            for _ in range(BATCH):
                first = receive(zmq.NOBLOCK, copy=False)
                second = receive(zmq.NOBLOCK, copy=False) if first.more else None
                payload = receive(zmq.NOBLOCK, copy=False) if second is not None and second.more else None
                user = user_of(first)
                rule = rule_of(user)
                if second is None or (payload is not None and payload.more):
                    self._refuse("frames", rule)
                    continue
                topic, header = first.bytes, second.bytes
                size = len(topic) + len(header) + (0 if payload is None else len(payload))
                if size > MESSAGE_BYTES:
                    self._refuse("size", rule)
                    continue
                if reason := refusal(rule, topic, header):
                    self._refuse(reason, rule)
                    continue
                if self._too_often(user, rule):
                    self._refuse("rate", rule)
                    continue
                self._pass_on(topic, header, payload, size)
                self._pings += PING.match(topic) is not None

    def _too_often(self, user: str | None, rule: Rule | None) -> bool:
        if self._allowance is None or user is None or rule is None or rule.grant.role == "syncer":
            return False
        return not self._allowance.take(user, time.monotonic())

    def _refuse(self, reason: str, rule: Rule | None) -> None:
        self._drop(reason)
        if rule is not None:
            self.offenders[str(rule.grant)] += 1

    def _more_about_drops(self) -> dict[str, Any]:
        return {"keys": dict(self.offenders)}


def user_of(frame: zmq.Frame) -> str | None:
    """The public half of the key of which the frame came; None for one that libzmq made itself."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return None
