"""Addresses of a broker: host names, IPv6, interfaces."""

from __future__ import annotations

import socket as network

import pytest
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.sockets import Address, is_ipv6
from decoupled_diloco.common.wire import prefix
from transport import broker_here, context, downlink, free_ports, meet, update, uplink


def has_ipv6() -> bool:
    try:
        with network.socket(network.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "bulk_out"),
    [
        ("tcp://127.0.0.1:5550", "tcp://127.0.0.1:5553"),
        ("tcp://broker:1", "tcp://broker:4"),
        ("tcp://a.b-c.example:65532", "tcp://a.b-c.example:65535"),
        ("tcp://my_broker:5550", "tcp://my_broker:5553"),
        ("tcp://[::1]:5550", "tcp://[::1]:5553"),
        ("tcp://[2001:db8::7]:5550", "tcp://[2001:db8::7]:5553"),
    ],
)
def test_one_address_names_four_ports(text: str, bulk_out: str) -> None:
    address = Address.parse(text)
    assert str(address) == address.control_in == text
    assert address.bulk_out == bulk_out
    assert len({address.control_in, address.control_out, address.bulk_in, address.bulk_out}) == 4


@pytest.mark.parametrize(
    "text",
    [
        "", "broker", "broker:5550", "tcp://", "tcp://:5550", "tcp://broker", "tcp://broker:", "tcp://broker:http",
        "tcp://broker:0", "tcp://broker:65533", "tcp://broker:99999", "tcp://broker:-1", "http://broker:5550",
        "tcp://broker:5550/", "tcp://broker:5550/run", "tcp://me@broker:5550", "tcp://a b:5550", "tcp://*:5550",
        "tcp://::1:5550", "tcp://[::1:5550", "tcp://[nine]:5550", "tcp://broker:5550\n", " tcp://broker:5550",
        "tcp://a..b:5550", "tcp://-a:5550", f"tcp://{'a' * 64}:5550", f"tcp://{'a.' * 200}a:5550",
        "tcp://bro\nker:5550", "tcp://broker;eth0:5550", "ipc:///tmp/x", "tcp://broker:5550?x=1", "tcp://broker:5550#x",
    ],
)  # fmt: skip
def test_a_malformed_address_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(SettingError) as caught:
        Address.parse(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("listen", ["127.0.0.1", "localhost", pytest.param("::1", id="ipv6")])
def test_a_broker_is_reached_by_its_address_and_by_name_over_either_protocol(listen: str) -> None:
    if is_ipv6(listen) and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with broker_here(listen) as (_, address), context() as made:
        for host in {listen, "localhost"} if not is_ipv6(listen) else {listen}:
            there = Address(host, address.port)
            down = downlink(made, there.bulk_out, prefix("run", "fragment"))
            up = uplink(made, there.bulk_in)
            meet(up, down, update())
            up.close()
            down.close()


def test_four_free_ports_are_free() -> None:
    first = free_ports()
    for port in range(first, first + 4):
        with network.socket() as listener:
            listener.bind(("127.0.0.1", port))
