"""The address at which ranks of other nodes reach those of this node: as it is set, else by the route to the bus."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import urlsplit

import psutil
import structlog

log = structlog.get_logger(__name__)

SETTING = "TRAINBUS_ADDRESS"
NATS_PORT = 4222
#: Where the ranks of a gang on one node meet: it is there whatever happens to the network.
LOOPBACK = "127.0.0.1"

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Server = tuple[str, int]


class AddressError(ValueError):
    """The node has no address at which others reach its ranks; the text says what to set."""


class Network(Protocol):
    """What a machine knows of its network."""

    def resolve(self, host: str) -> tuple[IpAddress, ...]:
        """Return the addresses of a host, the preferred first; none if its name cannot be resolved."""

    def find_source(self, target: IpAddress, port: int) -> IpAddress | None:
        """Return this machine's address on the route to ``target``; None if there is no route."""

    def interfaces(self) -> Mapping[str, tuple[IpAddress, ...]]:
        """Return the addresses of each interface."""


class MachineNetwork:
    """The network of this machine."""

    def resolve(self, host: str) -> tuple[IpAddress, ...]:
        with suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return tuple(dict.fromkeys(parse_ip(str(each[4][0])) for each in found))
        return ()

    def find_source(self, target: IpAddress, port: int) -> IpAddress | None:
        family = socket.AF_INET6 if target.version == 6 else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(target), port))  # chooses a route, sends nothing
            return parse_ip(str(probe.getsockname()[0]))
        return None

    def interfaces(self) -> Mapping[str, tuple[IpAddress, ...]]:
        return {name: tuple(_addresses(found)) for name, found in psutil.net_if_addrs().items()}


def _addresses(found: Iterable[psutil._common.snicaddr]) -> Iterable[IpAddress]:
    return (parse_ip(each.address) for each in found if each.family in (socket.AF_INET, socket.AF_INET6))


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where ranks of other nodes find those of this node."""

    #: An address or a name.
    announced: str
    #: This machine's address that it stands for, and the interface that has it; '' if none has.
    ip: IpAddress
    interface: str

    @property
    def is_ipv6(self) -> bool:
        return self.ip.version == 6


def find_node_address(setting: str | None, servers: Sequence[str], network: Network | None = None) -> NodeAddress:
    """Return the address that the node announces.

    Args:
        setting: the address or name that an operator chose; None or '': that of the route to the bus.
        servers: the URLs of the bus.

    Raises:
        AddressError: other nodes could not reach it.
    """
    network = network or MachineNetwork()
    bus = {server: addresses for server in map(_split, servers) if (addresses := network.resolve(server[0]))}
    if setting:
        return _check_address(setting.strip("[]"), bus, network)
    routed = _find_routed(bus, network)
    if routed is None:
        tried = _names(map(_split, servers))
        raise AddressError(f"no route to the bus ({tried}): set {SETTING} to this machine's address")
    return NodeAddress(str(routed), routed, find_interface(routed, network))


def find_interface(ip: IpAddress, network: Network | None = None) -> str:
    """Return the interface that has an address; for any loopback address that of loopback; '' if there is none."""
    for name, addresses in (network or MachineNetwork()).interfaces().items():
        if ip in addresses or (ip.is_loopback and any(each.is_loopback for each in addresses)):
            return name
    return ""


def parse_ip(text: str) -> IpAddress:
    """Return an address without its zone; IPv4 within IPv6 as IPv4.

    Raises:
        ValueError: it is none.
    """
    ip = ipaddress.ip_address(text.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip


def _split(url: str) -> Server:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return parts.hostname or LOOPBACK, parts.port or NATS_PORT


def _find_routed(bus: Mapping[Server, tuple[IpAddress, ...]], network: Network) -> IpAddress | None:
    """Return this machine's address on the route to the bus: to its first server that is not only on loopback."""
    found: list[IpAddress] = []
    for (_, port), addresses in bus.items():
        sources = (network.find_source(each, port) for each in addresses)
        found += [source for source in sources if source is not None][:1]
    return next((source for source in found if not source.is_loopback), found[0] if found else None)


def _check_address(setting: str, bus: Mapping[Server, tuple[IpAddress, ...]], network: Network) -> NodeAddress:
    """Return the address that an operator chose.

    Raises:
        AddressError: other nodes could not reach it.
    """
    remote = [server for server, addresses in bus.items() if not any(_is_local(each, network) for each in addresses)]
    try:
        ip: IpAddress | None = parse_ip(setting)
    except ValueError:
        ip = _find_named(setting, bus, network)
    if ip is None:
        raise AddressError(f"{SETTING} is {setting!r}, a name that stands for no address of this machine")
    if ip.is_loopback and remote:
        raise AddressError(
            f"{SETTING} is {setting!r}, a loopback address: ranks of other machines cannot reach it, and the bus "
            f"({_names(remote)}) is on another machine. Set it to this machine's address, or leave it unset"
        )
    if ip.version == 6 and ip.is_link_local:
        raise AddressError(f"{SETTING} is {setting!r}, which is valid on one link only: set another address")
    if not _is_local(ip, network):
        raise AddressError(f"{SETTING} is {setting!r}, and no network interface of this machine has that address")
    return NodeAddress(setting, ip, find_interface(ip, network))


def _find_named(name: str, bus: Mapping[Server, tuple[IpAddress, ...]], network: Network) -> IpAddress | None:
    """Return the address of this machine that a name stands for.

    Many machines resolve their own name to a loopback address (127.0.1.1). Others resolve it to the one on the network.
    """
    own = [each for each in network.resolve(name) if _is_local(each, network)]
    own.sort(key=lambda ip: ip.is_loopback)
    if not own or not own[0].is_loopback or name == "localhost":
        return own[0] if own else None
    return _find_routed(bus, network) or own[0]


def _is_local(ip: IpAddress, network: Network) -> bool:
    return ip.is_loopback or any(ip in addresses for addresses in network.interfaces().values())


def _names(servers: Iterable[Server]) -> str:
    return ", ".join(host for host, _ in servers)


class AddressFinder:
    """Finds the node's address once the bus is there, and again whenever the node joins."""

    def __init__(self, setting: str | None, servers: Sequence[str]) -> None:
        self._setting, self._servers = setting, servers
        self._found: NodeAddress | None = None

    @property
    def address(self) -> NodeAddress:
        """The address as it was found last."""
        assert self._found is not None
        return self._found

    async def __aenter__(self) -> Self:
        self._found = await self._find()
        log.info("ranks of other nodes reach this one", address=self._found.announced, interface=self._found.interface)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def find_again(self) -> NodeAddress:
        """Return the address of now; that of before if there is none, since the bus is reached again."""
        try:
            self._found = await self._find()
        except AddressError as error:
            log.warning("the node's address cannot be found again", error=str(error), address=self.address.announced)
        return self.address

    async def _find(self) -> NodeAddress:
        return await asyncio.to_thread(find_node_address, self._setting, self._servers)
