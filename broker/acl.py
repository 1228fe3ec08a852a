"""What the holder of a key may say and hear: decisions without a socket. The table stands in docs/protocol.md.

Nobody is told that he was refused: his message or subscription is left out, and counted.
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
"""That one key gets on one plane since its ports were last opened: libzmq keeps them for each connection, and nobody
can tell which connection took one back. Those of connections that have closed count as well."""
SUBSCRIPTIONS_SECONDS = 3600.0
"""Who got them all in a longer time may well be honest: a health check comes back for ever. For him all connections are
cut, and counted anew."""
REFUSALS = 1000
"""Of subscriptions by one key, after which it is barred: libzmq keeps each one that was asked for."""
PREFIX_BYTES = 128
"""Who asks for a longer one is barred; the longest that is allowed has 91 bytes."""
HELLO_HEADER_BYTES = 8192
"""The largest header of an observer's Hello that is looked into."""
CONTROL_A_SECOND, CONTROL_AT_ONCE = 500, 2000
"""Control messages of one key that are passed on; the syncer's are not counted. A learner sends one a second, and a few
dozen when it fetches. Without a limit one of them could fill the syncer's queue, where all the others' would be lost.
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
"""Kinds that each role hears of everybody in its run; beats and what is addressed to itself besides."""


def topic_pattern(
    plane: Plane, run: str = NAME, kinds: Mapping[str, str] = dict.fromkeys(MESSAGES, NAME)
) -> re.Pattern[bytes]:
    """Topics that pass on `plane`: RUN/KIND/[FRAGMENT/][NAME/], and for beats _/beat/RUN/.

    `run` and the values of `kinds` are patterns: of the run, and for each kind of the name in its topic.
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
    """What one grant comes to on one plane."""

    grant: Grant
    fits: Callable[[bytes], object]
    """Whether a whole topic may be published; true or false."""
    heard: tuple[bytes, ...]
    """What a subscription has to begin with, so that it lies wholly inside what is allowed."""

    @classmethod
    def of(cls, grant: Grant, plane: Plane) -> Rule:
        run, name = grant.run, grant.name
        own = f"{name}(?:-[a-z0-9-]{{0,{39 - len(name)}}})?" if len(name) < 40 else name
        kinds = {kind: NAME if (grant.role, kind) == ("syncer", "welcome") else own for kind in SAYS[grant.role]}
        heard = [beat_topic(run), *(prefix(run, kind) for kind in HEARS[grant.role])]
        for kind in ("ping",) if grant.role == "syncer" else ("ping", "welcome"):
            heard += [prefix(run, kind, name), prefix(run, kind) + f"{name}-".encode()]
        return cls(grant, topic_pattern(plane, run, kinds).fullmatch, tuple(heard))


class AccessControl:
    """Decides for one plane, by the grants that `grant_of` knows; `renew` when those have changed."""

    def __init__(self, plane: Plane, grant_of: Callable[[str], Grant | None]) -> None:
        self._plane, self._grant_of = plane, grant_of
        self._is_topic = topic_pattern(plane).fullmatch
        self._rules: dict[str, Rule] = {}

    def renew(self) -> None:
        """Forget what was worked out from earlier grants. Safe from every thread."""
        self._rules = {}

    def rule(self, user: str | None) -> Rule | None:
        """What holds for the key with the public half `user`; None where there is none (any more)."""
        rules = self._rules  # before the grant is asked for: `renew` comes after the grants have changed
        rule = rules.get(user or "")
        if rule is None and user is not None and (grant := self._grant_of(user)) is not None:
            rule = rules[user] = Rule.of(grant, self._plane)
        return rule

    def refusal(self, rule: Rule | None, topic: bytes, header: bytes) -> str:
        """Why a message is not passed on, in a word that is counted; "" if it is."""
        if rule is None:
            return "revoked"
        if not rule.fits(topic):
            return "denied" if self._is_topic(topic) else "topic"
        if rule.grant.role == "observer" and topic.split(b"/")[1] == b"hello" and not says_observer(header):
            return "denied"
        return ""


def says_observer(header: bytes) -> bool:
    """Whether a Hello's header says the role observer: a learner's Hello would be waited for in every round."""
    if len(header) > HELLO_HEADER_BYTES:
        return False
    try:
        rows = unpack(header, "header")
    except Malformed:
        return False
    return isinstance(rows, dict) and rows.get("role") == "observer"


class RateLimit:
    """How many messages of each key may pass: `at_once`, and again as time goes by (a token bucket)."""

    def __init__(self, a_second: float = CONTROL_A_SECOND, at_once: float = CONTROL_AT_ONCE) -> None:
        self._a_second, self._at_once = a_second, at_once
        self._left: dict[str, tuple[float, float]] = {}
        """Of each key: how many, and when that was."""

    def take(self, user: str, now: float) -> bool:
        """Whether one more of this key may pass; it is counted."""
        left, since = self._left.get(user, (self._at_once, now))
        left = min(self._at_once, left + (now - since) * self._a_second)
        self._left[user] = (left - (left >= 1), now)
        return left >= 1


@dataclass
class Subscriptions:
    """The subscriptions on one plane since its ports were last opened.

    A connection that closes leaves frames behind which take its subscriptions back and name nobody, the refused ones
    too. So what lives is known for each prefix, not for each key.
    """

    live: Counter[bytes] = field(default_factory=Counter)
    """Of each prefix: how often it was admitted and not taken back."""
    others: int = 0
    """Distinct live prefixes that are not for pings."""
    admitted: Counter[str] = field(default_factory=Counter)
    """Of each key, ever."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Of each key: subscriptions that were not admitted, ever."""
    _refused: Counter[bytes] = field(default_factory=Counter)
    """Of each prefix: how often it was refused and not taken back."""

    def full(self, user: str) -> bool:
        return self.admitted[user] >= SUBSCRIPTIONS

    def ask(self, user: str, prefix: bytes, rule: Rule | None) -> bool:
        """Whether the subscription is to be admitted; it is counted."""
        if rule is None or self.full(user) or not prefix.startswith(rule.heard):
            self.refusals[user] += 1
            self._refused[prefix] += 1
            return False
        self.admitted[user] += 1
        self.others += prefix not in self.live and not PING.match(prefix)
        self.live[prefix] += 1
        return True

    def take_back(self, prefix: bytes) -> None:
        """Somebody wants no more what he asked for once."""
        counter = self._refused if prefix in self._refused else self.live
        if prefix not in counter:
            return
        counter[prefix] -= 1
        if not counter[prefix]:
            del counter[prefix]
            self.others -= counter is self.live and not PING.match(prefix)
