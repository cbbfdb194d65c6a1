"""Checks of addresses: what Gloo and NCCL will use, and whether other hosts reach it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence

from laconic.doctor._addresses import port_is_free, unreachable
from laconic.doctor._facts import Facts
from laconic.doctor._finding import Finding, fine, named, problem

_VARIABLES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_HOW = "docs/howto/several-nodes.md says how"


def gloo_address(row: Facts) -> str:
    """What Gloo binds to: the interface that is named, or what the host's name leads to.

    Where that is none of this host's addresses, Gloo takes the loopback interface.
    """
    if row.gloo_interface:
        return row.interfaces.get(row.gloo_interface.split(",")[0], "")
    own = row.name_address
    if own is None or (row.interfaces and not _is_ours(own, row)):
        return "127.0.0.1"
    return own


def check_addresses(rows: Sequence[Facts]) -> Iterator[Finding]:
    """That other hosts reach what every rank binds to."""
    hosts = {row.place for row in rows}
    wrong = [*_unknown_interfaces(rows)]
    yield from wrong
    if not wrong and len(hosts) > 1:
        found = [*_loopback(rows), *_same_address(rows)]
        yield from found
        wrong += found
    if wrong:
        return
    told = dict.fromkeys(f"{gloo_address(row)} on {row.host}" for row in rows)
    text = f"Gloo binds to {', '.join(told)}"
    if len(hosts) == 1 and _is_loopback(gloo_address(rows[0])):
        text += ", which is enough for ranks of one host"
        name = best_interface(rows[0])
        advice = f"with several hosts, on each: {_export(name)}" if name else ""
        yield fine("addresses", text, advice)
    else:
        yield fine("addresses", text)


def best_interface(row: Facts) -> str | None:
    """The interface on the way to MASTER_ADDR, or the first that other hosts could reach."""
    outward = {name: one for name, one in row.interfaces.items() if not _is_loopback(one)}
    for name, address in outward.items():
        if address == row.route:
            return name
    return next(iter(outward), None)


def check_port(
    address: str,
    port: int,
    *,
    given: bool,
    free: Callable[[int], bool] = port_is_free,
    why_not: Callable[[str, int, float], str | None] = unreachable,
) -> Finding:
    """Alone: that MASTER_PORT can be listened on here, or that somebody answers at MASTER_ADDR."""
    where = f"{address}:{port}"
    if not given:
        if free(port):
            return fine("master", f"port {port}, torchrun's usual one, is free")
        return problem(
            "master",
            f"port {port}, torchrun's usual one, is in use on this host",
            f"torchrun --master-port {port + 1}, or end the program that listens there",
        )
    why = why_not(address, port, 2.0)
    if why is None:
        return fine("master", f"{where} answers")
    if "listens" in why:
        return fine("master", f"{where} is reachable, and nothing listens there yet")
    return problem(
        "master", f"MASTER_ADDR, {where}: {why}", f"check its name and the firewall: {_HOW}"
    )


def _unknown_interfaces(rows: Sequence[Facts]) -> Iterator[Finding]:
    for row in rows:
        for variable, value in zip(
            _VARIABLES, (row.gloo_interface, row.nccl_interface), strict=True
        ):
            plain = value and not value.startswith(("^", "="))  # NCCL's: all but, and exactly
            unknown = [
                name
                for name in value.split(",")
                if plain and row.interfaces and not _matches(name, row, variable)
            ]
            if unknown:
                yield problem(
                    "addresses",
                    f"{variable}={value} on {named([row.rank])} ({row.host}): no interface "
                    f"{unknown[0]} with an IPv4 address, there are {', '.join(row.interfaces)}",
                    _export(best_interface(row) or "eth0"),
                    [row.rank],
                )


def _matches(name: str, row: Facts, variable: str) -> bool:
    """NCCL takes the start of a name, Gloo all of it."""
    if variable == "NCCL_SOCKET_IFNAME":
        return any(known.startswith(name) for known in row.interfaces)
    return name in row.interfaces


def _loopback(rows: Sequence[Facts]) -> Iterator[Finding]:
    for row in rows:
        own = gloo_address(row)
        if _is_loopback(own):
            why = (
                f"GLOO_SOCKET_IFNAME={row.gloo_interface} is {own}"
                if row.gloo_interface
                else f"the host's name {row.host} leads to {row.name_address or 'no address'}"
            )
            yield problem(
                "addresses",
                f"{named([row.rank])}: {why}, so Gloo binds to {own}, which no other host reaches",
                f"on {row.host}: {_export(best_interface(row) or 'eth0')} (or correct /etc/hosts)",
                [row.rank],
            )


def _same_address(rows: Sequence[Facts]) -> Iterator[Finding]:
    """As that of a container's bridge, 172.17.0.1 on every host."""
    users: dict[str, list[Facts]] = {}
    for row in rows:
        users.setdefault(gloo_address(row), []).append(row)
    for address, sharing in users.items():
        if len({row.place for row in sharing}) > 1 and not _is_loopback(address):
            ranks = [row.rank for row in sharing]
            yield problem(
                "addresses",
                f"{named(ranks)} are on several hosts, and Gloo binds to {address} on all of them",
                "name the interface between the hosts: "
                + _export(best_interface(sharing[0]) or "eth0"),
                ranks,
            )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def _is_ours(address: str, row: Facts) -> bool:
    return ":" in address or _is_loopback(address) or address in row.interfaces.values()


def _export(interface: str) -> str:
    return "export " + " ".join(f"{variable}={interface}" for variable in _VARIABLES)
