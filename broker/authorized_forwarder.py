"""Forwarder for a plane with keys: checks each message and each subscription against the rights of its sender's key.

libzmq attaches the sender to each frame (`User-Id`: the public half of the key, proven in the handshake), and with
XPUB_MANUAL the broker decides which subscriptions to admit.
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
    """Forwards what `access` permits. `bar` is called, from this thread, with each key to be rejected from now on."""

    def __init__(
        self,
        plane: Plane,
        open_pair: OpenPair,
        on_failure: Callable[[], object],
        access: AccessControl,
        bar: Callable[[str, str], object],
    ) -> None:
        super().__init__(plane, open_pair, on_failure)
        self.access = access
        self.offenders: Counter[str] = Counter()
        """Denied messages and subscriptions, by key."""
        self._bar = bar
        self._rate_limit = RateLimit() if plane is Plane.CONTROL else None
        self._table, self._opened_at = Subscriptions(), time.monotonic()
        self._pings = self._counted = 0

    def in_use(self) -> bool:
        """Also true if a client sent anything but pings since the last call: clients that close connections in odd
        ways can distort the count of subscriptions.
        """
        before, self._counted = self._counted, self.messages - self._pings
        used = super().in_use()
        return used or self._counted > before

    def _reopen(self) -> None:
        self._table, self._opened_at = Subscriptions(), time.monotonic()
        super()._reopen()

    def _take_subscriptions(self) -> None:
        with contextlib.suppress(zmq.Again):  # no more are waiting
            for _ in range(BATCH):
                frame = self._sink.recv(zmq.NOBLOCK, copy=False)
                octets, user = frame.bytes, _user_of(frame)
                if len(octets) > 1 + PREFIX_BYTES:
                    self._reject_key(user, "sent a subscription that no topic begins with")
                elif octets[:1] == SUBSCRIBE:
                    self._admit(user, octets[1:])
                elif octets[:1] == UNSUBSCRIBE:
                    self._sink.setsockopt(zmq.UNSUBSCRIBE, octets[1:])
                    self._table.cancel(octets[1:])
                else:
                    # After such a frame libzmq assigns later frames to the wrong peer, so that a subscription would be
                    # admitted for another one. Our clients never send one.
                    self._reject_key(user, "sent a frame that is no subscription")
                if self._reopening:
                    break
        self.subscriptions, self.listening = len(self._table.live), self._table.others

    def _admit(self, user: str | None, prefix: bytes) -> None:
        if user is None:
            return
        if self._table.full(user) and time.monotonic() - self._opened_at > SUBSCRIPTIONS_SECONDS:
            self._reopening = True
            return
        rule = self.access.rule(user)
        if self._table.admit(user, prefix, rule):
            self._sink.setsockopt(zmq.SUBSCRIBE, prefix)
            self.visited |= not PING.match(prefix)
            return
        self.dropped["subscription"] += 1
        if rule is not None:
            self.offenders[str(rule.grant)] += 1
        if self._table.refusals[user] >= REFUSALS:
            self._reject_key(user, f"requested {REFUSALS} subscriptions that it has no right to")

    def _reject_key(self, user: str | None, why: str) -> None:
        """Bar the key, and cut every connection before another frame is read from this one."""
        self._reopening = True
        if user is not None:
            self._bar(user, why)

    def _forward_some(self) -> None:
        """Forward as in a plane without keys, and check each message against the rights of its key."""
        receive = self._source.recv
        rule_of, refusal = self.access.rule, self.access.refusal
        with contextlib.suppress(zmq.Again):  # no more are waiting
            for _ in range(BATCH):
                first = receive(zmq.NOBLOCK, copy=False)
                second = receive(zmq.NOBLOCK, copy=False) if first.more else None
                payload = receive(zmq.NOBLOCK, copy=False) if second is not None and second.more else None
                user = _user_of(first)
                rule = rule_of(user)
                if second is None or (payload is not None and payload.more):
                    self._deny("frames", rule)
                    continue
                topic, header = first.bytes, second.bytes
                size = len(topic) + len(header) + (0 if payload is None else len(payload))
                if size > MESSAGE_BYTES:
                    self._deny("size", rule)
                    continue
                if reason := refusal(rule, topic, header):
                    self._deny(reason, rule)
                    continue
                if self._over_rate(user, rule):
                    self._deny("rate", rule)
                    continue
                self._forward(topic, header, payload, size)
                self._pings += PING.match(topic) is not None

    def _over_rate(self, user: str | None, rule: Rule | None) -> bool:
        if self._rate_limit is None or user is None or rule is None or rule.grant.role == "syncer":
            return False
        return not self._rate_limit.take(user, time.monotonic())

    def _deny(self, reason: str, rule: Rule | None) -> None:
        self._drop(reason)
        if rule is not None:
            self.offenders[str(rule.grant)] += 1

    def _drop_details(self) -> dict[str, Any]:
        return {"keys": dict(self.offenders)}


def _user_of(frame: zmq.Frame) -> str | None:
    """The public half of the sender's key; None for a frame made by libzmq itself."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return None
