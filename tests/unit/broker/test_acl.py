"""Who may say and hear what: the table, cell by cell, without a socket."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from decoupled_diloco.broker.__main__ import IdleTimeout
from decoupled_diloco.broker.acl import SUBSCRIPTIONS, AccessControl, RateLimit, Rule, Subscriptions
from decoupled_diloco.common.auth_keys import ROLES, Grant, Role
from decoupled_diloco.common.wire import BOTH_PLANES, MESSAGES, Hello, Plane, beat_topic, encode
from hypothesis import given
from hypothesis import strategies as st

GRANTS: dict[str, Grant] = {role: Grant(run="run", role=role, name="bob", public=role) for role in ROLES}
SAID: dict[str, set[str]] = {
    "syncer": {"beat", "call", "welcome", "fragment", "keyframe", "ping"},
    "learner": {"hello", "alive", "goodbye", "fetch", "delta", "seed", "buffers", "ping"},
    "observer": {"hello", "fetch", "ping"},
}
HEARD: dict[str, set[str]] = {
    "syncer": {"hello", "alive", "goodbye", "fetch", "delta", "seed", "buffers", "beat"},
    "learner": {"beat", "call", "fragment", "keyframe"},
    "observer": {"beat", "call", "fragment", "keyframe"},
}


def hello(role: str) -> bytes:
    """The header of a Hello."""
    return bytes(encode(Hello(run="run", name="bob", incarnation=1, role=role, fingerprint="", bulk_proven=True))[1])


OBSERVER = hello("observer")


def topic(kind: str, name: str, run: str = "run") -> bytes:
    parts = [run, kind]
    named = ("hello", "welcome", "alive", "goodbye", "fetch", "delta", "seed", "buffers", "ping")
    parts += ["3"] if kind in ("call", "delta", "fragment", "keyframe", "seed", "buffers") else []
    parts += [name] if kind in named else []
    return beat_topic(run) if kind == "beat" else ("/".join(parts) + "/").encode()


def refusal(user: str, plane: Plane, what: bytes, header: bytes = OBSERVER) -> str:
    gate = AccessControl(plane, GRANTS.get)
    return gate.refusal(gate.rule(user), what, header)


def admits(user: str, prefix: bytes) -> bool:
    return Subscriptions().admit(user, prefix, Rule.of(GRANTS[user], Plane.CONTROL))


# --- what is said ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plane", Plane)
@pytest.mark.parametrize("kind", sorted(MESSAGES))
@pytest.mark.parametrize("role", ROLES)
def test_a_role_says_its_own_kinds_on_their_plane_under_its_own_name_in_its_own_run(
    role: Role, kind: str, plane: Plane
) -> None:
    may = kind in SAID[role] and (MESSAGES[kind].PLANE is plane or kind in BOTH_PLANES)
    assert (refusal(role, plane, topic(kind, "bob")) == "") is may
    assert refusal(role, plane, topic(kind, "bob", run="run1")) != ""
    assert refusal(role, plane, topic(kind, "bob", run="ru")) != ""
    for other in ("eve", "bobby", "bo", "b-bob"):
        named = topic(kind, other) != topic(kind, "bob")
        everybody = (role, kind) == ("syncer", "welcome")
        assert (refusal(role, plane, topic(kind, other)) == "") is (may and (not named or everybody))


def test_replicas_share_a_key_up_to_the_longest_name() -> None:
    for name, may in {"bob-1": True, "bob-": True, "bob-" + 36 * "x": True, "bob-" + 37 * "x": False}.items():
        assert (refusal("learner", Plane.CONTROL, topic("alive", name)) == "") is may
        assert (refusal("learner", Plane.BULK, topic("delta", name)) == "") is may
    long = Grant(run="run", role="learner", name=40 * "x", public="long")
    rule = Rule.of(long, Plane.CONTROL)
    assert rule.fits(topic("alive", 40 * "x"))
    assert not rule.fits(topic("alive", 41 * "x"))


def test_what_is_no_topic_at_all_is_distinguished_from_what_is_not_allowed() -> None:
    assert refusal("learner", Plane.CONTROL, b"nonsense") == "topic"
    assert refusal("learner", Plane.CONTROL, b"run/alive/bob/more/") == "topic"
    assert refusal("learner", Plane.CONTROL, b"run/alive/bob/\n") == "topic"
    assert refusal("learner", Plane.CONTROL, b"run/call/3/") == "denied"
    assert refusal("learner", Plane.CONTROL, b"_/beat/run/") == "denied"
    assert refusal("nobody", Plane.CONTROL, b"run/call/3/") == "revoked"


HEADERS: dict[str, tuple[bytes, bool]] = {
    "as an observer": (OBSERVER, True),
    "as a learner": (hello("learner"), False),
    "as both": (b"\x82" + 2 * msgpack.packb("role") + msgpack.packb("observer"), False),
    "as nobody": (msgpack.packb({"name": "bob"}), False),
    "no map": (msgpack.packb(["role", "observer"]), False),
    "noise": (bytes(range(256)), False),
    "nothing": (b"", False),
    "room for four billion": (b"\xdf\xff\xff\xff\xff", False),
    "very long": (msgpack.packb({"role": "observer", "host": "x" * 9000}), False),
}


@pytest.mark.parametrize(("header", "may"), HEADERS.values(), ids=HEADERS)
def test_an_observer_s_hello_is_one_of_an_observer(header: bytes, may: bool) -> None:
    assert (refusal("observer", Plane.CONTROL, topic("hello", "bob"), header) == "") is may
    assert refusal("learner", Plane.CONTROL, topic("hello", "bob"), header) == "", "a learner may have either role"


@pytest.mark.parametrize("called", sorted(MESSAGES))
def test_a_learner_named_like_a_kind_of_message_is_served_like_any_other(called: str) -> None:
    grant = Grant(run=called, role="observer", name=called, public="")
    gate = AccessControl(Plane.CONTROL, lambda _: grant)
    for kind in ("fetch", "ping"):
        assert gate.refusal(gate.rule("key"), topic(kind, called, run=called), b"no map") == ""
    assert gate.refusal(gate.rule("key"), topic("hello", called, run=called), hello("learner")) == "denied"


@given(st.sampled_from(ROLES), st.sampled_from(Plane), st.binary(max_size=40) | st.from_regex(rb"run/[a-z]*/[3/bo-]*/"))
def test_nothing_passes_that_the_table_does_not_have(role: Role, plane: Plane, what: bytes) -> None:
    if refusal(role, plane, what) == "":
        assert what == beat_topic("run") or what.split(b"/")[1].decode() in SAID[role]


def test_a_gate_forgets_a_grant_when_it_is_renewed() -> None:
    known: dict[str, Grant] = dict(GRANTS)
    gate = AccessControl(Plane.CONTROL, known.get)
    assert gate.rule("learner") is gate.rule("learner") is not None
    del known["learner"]
    gate.renew()
    assert gate.rule("learner") is None
    assert gate.rule(None) is None


# --- what is heard ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", sorted(MESSAGES))
@pytest.mark.parametrize("role", ROLES)
def test_a_role_hears_its_kinds_of_its_own_run(role: Role, kind: str) -> None:
    whole = beat_topic("run") if kind == "beat" else f"run/{kind}/".encode()
    assert admits(role, whole) is (kind in HEARD[role])
    assert admits(role, topic(kind, "bob")) is (
        kind in HEARD[role] or kind == "ping" or (kind == "welcome" and role != "syncer")
    )
    assert not admits(role, topic(kind, "bob", run="run1"))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "prefix",
    [
        b"", b"r", b"run", b"run/", b"_", b"_/", b"_/beat/", b"_/beat/run", b"_/beat/run1/", b"run1/", b"run/f",
        b"run/call", b"run/welcome/", b"run/welcome/bob", b"run/welcome/eve/", b"run/welcome/bobby/", b"run/ping/",
        b"run/ping/eve/", b"run/ping/bob", b"\x00", b"\n",
    ],
)  # fmt: skip
def test_a_subscription_wider_than_what_is_allowed_is_refused(role: Role, prefix: bytes) -> None:
    assert not admits(role, prefix)


@pytest.mark.parametrize("role", ["learner", "observer"])
def test_a_learner_that_shares_a_name_hears_the_welcome_of_all_who_do(role: Role) -> None:
    for prefix in (b"run/welcome/bob/", b"run/welcome/bob-1/", b"run/welcome/bob-", b"run/ping/bob-1/"):
        assert admits(role, prefix)


# --- how many --------------------------------------------------------------------------------------------------------
RULE = Rule.of(GRANTS["learner"], Plane.CONTROL)


def fill(table: Subscriptions, count: int) -> int:
    return sum(table.admit("learner", b"run/call/%d/" % i, RULE) for i in range(count))


def test_a_key_gets_so_many_subscriptions_and_another_has_its_own() -> None:
    table = Subscriptions()
    assert fill(table, SUBSCRIPTIONS + 50) == SUBSCRIPTIONS
    assert table.refusals["learner"] == 50
    assert table.admit("observer", b"run/call/", Rule.of(GRANTS["observer"], Plane.CONTROL))


def test_what_is_taken_back_gives_no_room_for_more_since_another_connection_may_still_have_it() -> None:
    table = Subscriptions()
    assert fill(table, SUBSCRIPTIONS) == SUBSCRIPTIONS
    for i in range(SUBSCRIPTIONS):
        table.cancel(b"run/call/%d/" % i)
    assert not table.live
    assert table.full("learner")
    assert not table.admit("learner", b"run/call/", RULE)


def test_subscriptions_of_connections_that_closed_live_no_more() -> None:
    table = Subscriptions()
    for _ in range(5):
        assert fill(table, 100) == 100
        assert table.others == 100
        for i in range(100):
            table.cancel(b"run/call/%d/" % i)
        assert not table.live
        assert table.others == 0


def test_a_prefix_lives_as_long_as_anybody_has_it() -> None:
    table = Subscriptions()
    for user in ("learner", "observer"):
        assert table.admit(user, b"run/call/", Rule.of(GRANTS[user], Plane.CONTROL))
    table.cancel(b"run/call/")
    assert table.others == 1
    table.cancel(b"run/call/")
    assert table.others == 0


def test_what_was_refused_and_closes_takes_nobody_s_subscription_along() -> None:
    table, syncer = Subscriptions(), Rule.of(GRANTS["syncer"], Plane.BULK)
    assert not table.admit("learner", b"run/delta/", RULE)
    assert table.admit("syncer", b"run/delta/", syncer)
    table.cancel(b"run/delta/")
    table.cancel(b"never/asked/")
    assert table.others == 1
    table.cancel(b"run/delta/")
    assert table.others == 0


def test_pings_count_as_subscriptions_and_not_as_somebody_s_presence() -> None:
    table = Subscriptions()
    assert table.admit("learner", b"run/ping/bob/", RULE)
    assert (len(table.live), table.others) == (1, 0)
    table.cancel(b"run/ping/bob/")
    assert (len(table.live), table.others) == (0, 0)


STEPS = st.lists(
    st.tuples(st.sampled_from([*ROLES, None]), st.sampled_from([b"run/call/", b"run/delta/", b"run/ping/bob/", b"x"])),
    max_size=60,
)


@given(STEPS)
def test_whatever_is_asked_and_taken_back_in_whatever_order_nothing_is_kept_forever(steps: list[Any]) -> None:
    table, asked = Subscriptions(), []
    for user, prefix in steps:
        if user is not None:
            table.admit(user, prefix, Rule.of(GRANTS[user], Plane.CONTROL))
            asked.append(prefix)
        else:
            table.cancel(prefix)
        assert table.others == len(table.live) - (b"run/ping/bob/" in table.live)
    for prefix in asked:
        table.cancel(prefix)
    assert not table.live
    assert not table._refused
    assert table.others == 0


# --- idleness --------------------------------------------------------------------------------------------------------
def test_a_broker_is_idle_once_somebody_was_there_and_nobody_has_been_for_so_long() -> None:
    idle = IdleTimeout(10)
    assert not any(idle.over(now, in_use=False) for now in (0, 100)), "nobody was there yet"
    assert not idle.over(101, in_use=True)
    assert not idle.over(110, in_use=False)
    assert not idle.over(111, in_use=True), "somebody came back"
    assert not idle.over(120.9, in_use=False)
    assert idle.over(121, in_use=False)


def test_a_broker_that_was_not_told_to_is_never_idle() -> None:
    idle = IdleTimeout(0)
    assert not idle.over(1, in_use=True)
    assert not idle.over(1e9, in_use=False)


# --- how often -------------------------------------------------------------------------------------------------------
def test_so_many_messages_of_a_key_pass_at_once_and_then_so_many_a_second_whatever_others_send() -> None:
    allowance = RateLimit(a_second=10, at_once=30)
    assert sum(allowance.take("eve", 5.0) for _ in range(1000)) == 30
    passed = sum(allowance.take("eve", 5.0 + i / 1000) for i in range(10_000))
    assert 98 <= passed <= 101
    assert all(allowance.take("bob", 5.0) for _ in range(30))


def test_a_client_that_sends_less_than_the_allowance_is_never_kept_waiting() -> None:
    allowance = RateLimit(a_second=10, at_once=30)
    assert all(allowance.take("bob", i / 9) for i in range(10_000))
