"""The address that a node announces, on machines that the tests make up, and on this one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import pytest

from services.worker.node.address import (
    AddressError,
    AddressFinder,
    IpAddress,
    MachineNetwork,
    find_interface,
    find_node_address,
    parse_ip,
)

#: Names that any machine here resolves, besides addresses.
NAMES = {
    "localhost": ("::1", "127.0.0.1"),
    "node": ("127.0.1.1",),
    "node.lan": ("10.0.0.5",),
    "bus": ("10.0.0.1",),
    "bus6": ("fd00::1",),
    "both": ("fd00:bad::1", "10.0.0.1"),
    "away": (),
}
INTERFACES = {
    "lo": ("127.0.0.1", "::1"),
    "eth1": ("10.0.0.5", "fd00::5", "fe80::5"),
    "eth10": ("192.168.7.5",),
}
#: The source of a packet to what begins so.
ROUTES = {"127.": "127.0.0.1", "::1": "::1", "10.0.0.": "10.0.0.5", "192.168.7.": "192.168.7.5", "fd00::": "fd00::5"}


class FakeNetwork:
    def resolve(self, host: str) -> tuple[IpAddress, ...]:
        try:
            return (parse_ip(host),)
        except ValueError:
            return tuple(map(ipaddress.ip_address, NAMES[host]))

    def find_source(self, target: IpAddress, port: int) -> IpAddress | None:
        if str(target) in (own for each in INTERFACES.values() for own in each):
            return target
        found = next((source for start, source in ROUTES.items() if str(target).startswith(start)), None)
        return ipaddress.ip_address(found) if found else None

    def interfaces(self) -> Mapping[str, tuple[IpAddress, ...]]:
        return {name: tuple(map(ipaddress.ip_address, each)) for name, each in INTERFACES.items()}


@pytest.mark.parametrize(
    ("servers", "announced", "interface"),
    [
        pytest.param("nats://127.0.0.1:4222", "127.0.0.1", "lo", id="bus on loopback"),
        pytest.param("nats://[::1]:4222", "::1", "lo", id="bus on the loopback of IPv6"),
        pytest.param("nats://10.0.0.1:4222", "10.0.0.5", "eth1", id="bus elsewhere"),
        pytest.param("tls://user:secret@bus", "10.0.0.5", "eth1", id="by name, without a port"),
        pytest.param("bus:4222", "10.0.0.5", "eth1", id="without a scheme"),
        pytest.param("nats://[fd00::1]:4222", "fd00::5", "eth1", id="bus elsewhere, over IPv6"),
        pytest.param("nats://bus6", "fd00::5", "eth1", id="a name for IPv6"),
        pytest.param("nats://both", "10.0.0.5", "eth1", id="the first address has no route"),
        pytest.param("nats://192.168.7.5:4222", "192.168.7.5", "eth10", id="bus on this machine's own address"),
        pytest.param("nats://away,nats://bus", "10.0.0.5", "eth1", id="the first server is unknown"),
        pytest.param("nats://127.0.0.1,nats://bus", "10.0.0.5", "eth1", id="a cluster with a server on this machine"),
    ],
)
def test_the_address_is_that_of_the_route_to_the_bus(servers: str, announced: str, interface: str) -> None:
    found = find_node_address(None, servers.split(","), FakeNetwork())
    assert (found.announced, found.interface) == (announced, interface)
    assert found.is_ipv6 == (":" in announced)


@pytest.mark.parametrize(
    ("setting", "servers", "ip", "interface"),
    [
        pytest.param("192.168.7.5", "nats://bus", "192.168.7.5", "eth10", id="another network than the bus's"),
        pytest.param("fd00::5", "nats://bus", "fd00::5", "eth1", id="IPv6"),
        pytest.param("127.0.0.1", "nats://127.0.0.1", "127.0.0.1", "lo", id="loopback, as the bus"),
        pytest.param("127.0.0.9", "nats://10.0.0.5", "127.0.0.9", "lo", id="loopback, the bus on an own address"),
        pytest.param("localhost", "nats://localhost", "::1", "lo", id="localhost"),
        pytest.param("node.lan", "nats://bus", "10.0.0.5", "eth1", id="a name"),
        pytest.param("node", "nats://bus", "10.0.0.5", "eth1", id="a name that is loopback on its own machine"),
        pytest.param("10.0.0.5", "nats://away", "10.0.0.5", "eth1", id="the bus is unknown"),
    ],
)
def test_an_address_that_is_set_holds(setting: str, servers: str, ip: str, interface: str) -> None:
    found = find_node_address(setting, servers.split(","), FakeNetwork())
    assert (found.announced, str(found.ip), found.interface) == (setting, ip, interface)


def test_an_address_in_brackets_is_announced_without() -> None:
    assert find_node_address("[fd00::5]", ["nats://bus"], FakeNetwork()).announced == "fd00::5"


@pytest.mark.parametrize(
    ("setting", "servers", "reason"),
    [
        pytest.param("127.0.0.1", "nats://bus", r"loopback .*\(bus\) is on another machine. Set it", id="loopback"),
        pytest.param("::1", "nats://bus", "loopback", id="loopback of IPv6"),
        pytest.param("localhost", "nats://127.0.0.1,nats://bus", "loopback", id="a cluster, one server here"),
        pytest.param("0.0.0.0", "nats://bus", "no network interface of this machine", id="every address"),
        pytest.param("10.0.0.6", "nats://bus", "no network interface of this machine", id="another machine's"),
        pytest.param("bus", "nats://bus", "stands for no address of this machine", id="another machine's name"),
        pytest.param("away", "nats://bus", "stands for no address of this machine", id="an unknown name"),
        pytest.param("fe80::5", "nats://bus", "one link only", id="link-local"),
        pytest.param(None, "nats://away", r"no route to the bus \(away\): set TRAINBUS_ADDRESS", id="unknown bus"),
        pytest.param("", "nats://8.8.8.8", "no route to the bus", id="no route"),
    ],
)
def test_what_others_cannot_reach_is_refused_with_what_to_set(setting: str | None, servers: str, reason: str) -> None:
    with pytest.raises(AddressError, match=reason):
        find_node_address(setting, servers.split(","), FakeNetwork())


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_this_machine_announces_loopback_where_the_bus_is_on_it(loopback: str) -> None:
    if loopback not in map(str, MachineNetwork().resolve(loopback)) or not find_interface(parse_ip(loopback)):
        pytest.skip(f"this machine has no {loopback}")
    url = f"nats://[{loopback}]:4222" if ":" in loopback else f"nats://{loopback}:4222"
    found = find_node_address(None, [url])
    assert found.announced == loopback
    assert socket.if_nametoindex(found.interface)


def test_the_address_of_a_bus_on_this_machine_is_found_by_its_own_address() -> None:
    for ip in (ip for each in MachineNetwork().interfaces().values() for ip in each):
        if not (ip.is_loopback or ip.is_link_local):
            found = find_node_address(None, [f"nats://[{ip}]" if ip.version == 6 else f"nats://{ip}"])
            assert (found.ip, found.interface) == (ip, find_interface(ip))


async def test_an_address_is_kept_while_it_cannot_be_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AddressFinder(None, ["nats://127.0.0.1"]) as finder:
        monkeypatch.setattr(MachineNetwork, "resolve", lambda *_: ())
        assert (await finder.find_again()).announced == "127.0.0.1"
        monkeypatch.undo()
        monkeypatch.setattr(MachineNetwork, "find_source", lambda *_: ipaddress.ip_address("10.1.1.1"))
        assert (await finder.find_again()).announced == "10.1.1.1"
