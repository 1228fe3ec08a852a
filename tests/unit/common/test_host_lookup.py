"""Whether host names can be resolved: by the real resolver, and by ones that are slow or change their mind."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from decoupled_diloco.common.host_lookup import AGAIN_SECONDS, SLOW_SECONDS, HostWatch, Lookup


class Resolver:
    """Knows `addresses` now: host -> families."""

    def __init__(self, **addresses: tuple[socket.AddressFamily, ...]) -> None:
        self.addresses: dict[str, tuple[socket.AddressFamily, ...]] = dict(addresses)
        self.open = threading.Event()
        self.open.set()
        self.asked = 0

    def __call__(self, host: str, _port: None, family: socket.AddressFamily, _kind: Any) -> list[Any]:
        self.asked += 1
        assert self.open.wait(60)
        if family not in self.addresses.get(host, ()):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []


def asked(lookup: Lookup, now: float) -> None:
    lookup.start(now)
    lookup.wait(60)


def test_the_real_resolver_knows_localhost_and_no_invalid_name() -> None:
    here, nowhere = Lookup("localhost"), Lookup("nowhere.invalid")
    for lookup in (here, nowhere):
        asked(lookup, 1.0)
    assert here.trouble(1.0, 1.0) == ""
    assert here.answer is not None
    assert here.answer.family in (socket.AF_INET, socket.AF_INET6)
    assert nowhere.trouble(1.0, 1.0).startswith("host name nowhere.invalid cannot be resolved (")


def test_a_name_is_asked_again_and_what_it_leads_to_may_change() -> None:
    resolver = Resolver()
    lookup = Lookup("broker", resolver)
    asked(lookup, 1.0)
    assert lookup.trouble(1.0, 1.0) == (
        "host name broker cannot be resolved (Name or service not known); is it spelled right?"
    )
    resolver.addresses["broker"] = (socket.AF_INET6,)
    asked(lookup, 1.0 + AGAIN_SECONDS / 2)
    assert lookup.trouble(1.0, 2.0) != "", "an answer counts for a while"
    asked(lookup, 1.0 + AGAIN_SECONDS)
    assert lookup.trouble(1.0, 3.0) == ""
    assert lookup.answer is not None
    assert lookup.answer.family is socket.AF_INET6
    del resolver.addresses["broker"]
    asked(lookup, 10.0)
    assert "cannot be resolved" in lookup.trouble(10.0, 10.0)
    assert lookup.trouble(11.0, 11.0) == "", "what was asked before a connection went down says nothing of now"


def test_a_resolver_that_does_not_answer_delays_no_other_and_is_named() -> None:
    resolver = Resolver()
    resolver.open.clear()
    lookup = Lookup("broker", resolver)
    place = HostWatch("broker", lambda _: lookup)
    assert place.family(0.01) is socket.AF_INET6
    since = place._down_since
    assert since is not None
    place.look(connected=False, now=since + SLOW_SECONDS)
    assert place.unresolved == "host name broker cannot be resolved: no name server answers"
    assert resolver.asked == 1, "one question at a time"
    resolver.addresses["broker"] = (socket.AF_INET,)
    resolver.open.set()
    lookup.wait(60)
    place.look(connected=False, now=since + SLOW_SECONDS)
    assert place.unresolved == ""
    assert place.newest_family() is socket.AF_INET


def test_a_name_is_only_asked_for_while_the_connection_is_down() -> None:
    resolver = Resolver(broker=(socket.AF_INET,))
    lookup = Lookup("broker", resolver)
    place = HostWatch("broker", lambda _: lookup)
    assert place.family(60) is socket.AF_INET
    for second in range(100):
        place.look(connected=True, now=1e9 + second)
    assert resolver.asked == 1
    del resolver.addresses["broker"]
    place.look(connected=False, now=2e9)
    lookup.wait(60)
    place.look(connected=False, now=2e9 + 0.1)
    assert "host name broker cannot be resolved" in place.unresolved
    place.look(connected=True, now=2e9 + 0.2)
    assert place.unresolved == ""


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_an_address_in_figures_needs_no_lookup(host: str, family: socket.AddressFamily) -> None:
    def names(_: str) -> Lookup:
        raise AssertionError("it was asked for")

    place = HostWatch(host, names)
    assert place.family(60) is family
    place.look(connected=False, now=1.0)
    assert (place.unresolved, place.newest_family()) == ("", None)
