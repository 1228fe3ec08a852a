"""Access control list: which messages and subscriptions each key permits. Pure decisions, no sockets; the table is in
docs/protocol.md.

A denied message or subscription is dropped and counted; its sender receives no answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..common.auth_keys import Grant, Role
from ..common.errors import Malformed
from ..common.wire import BOTH_PLANES, FRAGMENT_KINDS, MESSAGES, NAMED_KINDS, Plane, beat_topic, prefix, unpack

SUBSCRIPTIONS = 10_000
"""Limit for one key on one plane since its ports were last opened. libzmq keeps subscriptions for each connection and
does not say which connection cancelled one, so those of closed connections count as well."""
SUBSCRIPTIONS_SECONDS = 3600.0
"""A key that used up the limit in a longer time may be honest: a health check reconnects for ever. All connections are
then cut and the count starts again."""
REFUSALS = 1000
"""Denied subscriptions after which a key is barred: libzmq keeps every requested one in memory."""
PREFIX_BYTES = 128
"""A key that requests a longer prefix is barred; the longest permitted one has 91 bytes."""
HELLO_HEADER_BYTES = 8192
"""The largest header of an observer's Hello that is parsed."""
CONTROL_A_SECOND, CONTROL_AT_ONCE = 500, 2000
"""Control messages forwarded for one key, except the syncer's. A learner sends one a second, and a few dozen when it
fetches. Without a limit one key could fill the syncer's queue, and the other learners' messages would be lost.
"""
NAME = "[a-z0-9][a-z0-9-]{0,39}"
PING = re.compile(f"{NAME}/ping/".encode())

SAYS: Mapping[Role, frozenset[str]] = {
    "syncer": frozenset({"beat", "call", "welcome", "fragment", "keyframe", "ping"}),
    "learner": frozenset({"hello", "alive", "goodbye", "fetch", "delta", "seed", "buffers", "ping"}),
    "observer": frozenset({"hello", "fetch", "ping"}),
}
"""Kinds that each role publishes, of its own run."""
HEARS: Mapping[Role, tuple[str, ...]] = {
    "syncer": ("hello", "alive", "goodbye", "fetch", "delta", "seed", "buffers"),
    "learner": ("call", "fragment", "keyframe"),
    "observer": ("call", "fragment", "keyframe"),
}
"""Kinds that each role receives from its whole run, in addition to beats and messages addressed to its own name."""


def topic_pattern(
    plane: Plane, run: str = NAME, kinds: Mapping[str, str] = dict.fromkeys(MESSAGES, NAME)
) -> re.Pattern[bytes]:
    """Pattern of the topics permitted on `plane`: RUN/KIND/[FRAGMENT/][NAME/], and _/beat/RUN/ for beats.

    `run` and the values of `kinds` are patterns themselves: for the run, and for the name in each kind's topic.
    """
    allowed = [
        f"{run}/{kind}"
        + ("/[0-9]{1,6}" if kind in FRAGMENT_KINDS else "")
        + (f"/{name}" if kind in NAMED_KINDS else "")
        for kind, name in kinds.items()
        if (MESSAGES[kind].PLANE is plane or kind in BOTH_PLANES) and kind != "beat"
    ]
    allowed += [f"_/beat/{run}"] if "beat" in kinds else []
    return re.compile(f"(?:{'|'.join(allowed)})/".encode())


@dataclass(frozen=True)
class Rule:
    """What one grant permits on one plane."""

    grant: Grant
    fits: Callable[[bytes], object]
    """Whether a complete topic may be published: truthy or falsy."""
    readable: tuple[bytes, ...]
    """A permitted subscription begins with one of these prefixes."""

    @classmethod
    def of(cls, grant: Grant, plane: Plane) -> Rule:
        run, name = grant.run, grant.name
        own = f"{name}(?:-[a-z0-9-]{{0,{39 - len(name)}}})?" if len(name) < 40 else name
        kinds = {kind: NAME if (grant.role, kind) == ("syncer", "welcome") else own for kind in SAYS[grant.role]}
        readable = [beat_topic(run), *(prefix(run, kind) for kind in HEARS[grant.role])]
        for kind in ("ping",) if grant.role == "syncer" else ("ping", "welcome"):
            readable += [prefix(run, kind, name), prefix(run, kind) + f"{name}-".encode()]
        return cls(grant, topic_pattern(plane, run, kinds).fullmatch, tuple(readable))


class AccessControl:
    """Decisions for one plane, based on the grants that `grant_of` returns; call `renew` when those change."""

    def __init__(self, plane: Plane, grant_of: Callable[[str], Grant | None]) -> None:
        self._plane, self._grant_of = plane, grant_of
        self._is_topic = topic_pattern(plane).fullmatch
        self._rules: dict[str, Rule] = {}

    def renew(self) -> None:
        """Drop the rules derived from earlier grants. Thread-safe."""
        self._rules = {}

    def rule(self, user: str | None) -> Rule | None:
        """The rule for the key with public half `user`; None if the key is unknown or revoked."""
        rules = self._rules  # read before the grant: `renew` is called after the grants have changed
        rule = rules.get(user or "")
        if rule is None and user is not None and (grant := self._grant_of(user)) is not None:
            rule = rules[user] = Rule.of(grant, self._plane)
        return rule

    def refusal(self, rule: Rule | None, topic: bytes, header: bytes) -> str:
        """The reason a message is dropped, as one word for the counters; "" if it is forwarded."""
        if rule is None:
            return "revoked"
        if not rule.fits(topic):
            return "denied" if self._is_topic(topic) else "topic"
        if rule.grant.role == "observer" and topic.split(b"/")[1] == b"hello" and not _announces_observer(header):
            return "denied"
        return ""


def _announces_observer(header: bytes) -> bool:
    """Whether a Hello's header names the role observer. A Hello as a learner would make every round wait for it."""
    if len(header) > HELLO_HEADER_BYTES:
        return False
    try:
        rows = unpack(header, "header")
    except Malformed:
        return False
    return isinstance(rows, dict) and rows.get("role") == "observer"


class RateLimit:
    """Token bucket for each key: `at_once` messages in a burst, `a_second` on average."""

    def __init__(self, a_second: float = CONTROL_A_SECOND, at_once: float = CONTROL_AT_ONCE) -> None:
        self._a_second, self._at_once = a_second, at_once
        self._left: dict[str, tuple[float, float]] = {}
        """For each key: tokens left, and the time of that count."""

    def take(self, user: str, now: float) -> bool:
        """Count one message of this key; returns whether it may pass."""
        left, since = self._left.get(user, (self._at_once, now))
        left = min(self._at_once, left + (now - since) * self._a_second)
        self._left[user] = (left - (left >= 1), now)
        return left >= 1


@dataclass
class Subscriptions:
    """The subscriptions on one plane since its ports were last opened.

    libzmq cancels the subscriptions of a closed connection, the denied ones too, without naming the key. So live
    subscriptions are counted by prefix, not by key.
    """

    live: Counter[bytes] = field(default_factory=Counter)
    """For each prefix: admitted subscriptions not cancelled since."""
    others: int = 0
    """Distinct live prefixes other than those for pings."""
    admitted: Counter[str] = field(default_factory=Counter)
    """For each key: subscriptions admitted since the ports were opened."""
    refusals: Counter[str] = field(default_factory=Counter)
    """For each key: subscriptions denied since the ports were opened."""
    _refused: Counter[bytes] = field(default_factory=Counter)
    """For each prefix: denied subscriptions not cancelled since."""

    def full(self, user: str) -> bool:
        return self.admitted[user] >= SUBSCRIPTIONS

    def admit(self, user: str, prefix: bytes, rule: Rule | None) -> bool:
        """Count a subscription; returns whether it is admitted."""
        if rule is None or self.full(user) or not prefix.startswith(rule.readable):
            self.refusals[user] += 1
            self._refused[prefix] += 1
            return False
        self.admitted[user] += 1
        self.others += prefix not in self.live and not PING.match(prefix)
        self.live[prefix] += 1
        return True

    def cancel(self, prefix: bytes) -> None:
        """Count the cancellation of one subscription."""
        counter = self._refused if prefix in self._refused else self.live
        if prefix not in counter:
            return
        counter[prefix] -= 1
        if not counter[prefix]:
            del counter[prefix]
            self.others -= counter is self.live and not PING.match(prefix)
