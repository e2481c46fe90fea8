"""Fetch what a client names from hosts that an operator allows: limits on size, time and redirects, no private address.

A name is resolved once, its addresses are checked, and to those the connection is made: no second answer of a name server
can lead elsewhere. No proxy, no cookies, no decompression.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from fdel.serve.server.openai import APIError

REDIRECTS = 3
SECONDS = 10.0  # for all of it
PORTS = {"http": 80, "https": 443}
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052
ISATAP = 0x5EFE  # before the IPv4 address, but for a bit (RFC 5214)
HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "fdel"}


def public(address: str) -> bool:
    """Tell whether an IP address is one of the internet's, not of this machine or of a network around it.

    An IPv6 address that leads to an IPv4 one is as public as that: mapped, 6to4, Teredo (its server too), ISATAP, NAT64.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = [] if isinstance(ip, ipaddress.IPv4Address) else _inner(ip)
    alone = (
        isinstance(ip, ipaddress.IPv6Address) and ip in NAT64
    )  # a gateway to the internet, which ipaddress calls reserved
    outer = [] if alone else [ip]
    return all(a.is_global and not (a.is_multicast or a.is_reserved or a.is_unspecified) for a in [*outer, *inner])


def _inner(ip: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Give the IPv4 addresses that stand in one of IPv6."""
    last = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    whole = ip in NAT64 or (int(ip) >> 32 & 0xFDFFFFFF) == ISATAP
    return [a for a in (ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ()), last if whole else None) if a is not None]


class Private(OSError):
    """A name that leads to an address of this machine or of a network around it."""


class Resolver(AbstractResolver):
    """Resolves names to public addresses alone."""

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_UNSPEC) -> list[ResolveResult]:
        """Give the addresses of a name; OSError if any of them is not public."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        if private := [at[0] for *_, at in found if not public(str(at[0]))]:
            raise Private(f"{host} is the private address {private[0]}")
        return [
            ResolveResult(
                hostname=host, host=str(at[0]), port=port, family=kind, proto=proto, flags=socket.AI_NUMERICHOST
            )
            for kind, _, proto, _, at in found
        ]

    async def close(self) -> None:
        """Nothing is held."""


async def fetch(address: str, hosts: Collection[str], most: int, path: str, kind: str = "images") -> bytes:
    """Fetch a file of at most `most` bytes from one of `hosts` (NAME, or NAME:PORT). APIError for the parameter `path`."""
    refused = lambda why: APIError(f"{path}: {why}", param=path)
    if not hosts:
        raise refused(f"this server fetches no {kind}; send a data URL, data:TYPE/...;base64,...")
    connector = aiohttp.TCPConnector(resolver=Resolver(), use_dns_cache=False, limit=1)
    jar = aiohttp.DummyCookieJar()
    try:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession(
            connector=connector, cookie_jar=jar, auto_decompress=False, trust_env=False, headers=HEADERS
        ) as session:  # fmt: skip
            for _ in range(REDIRECTS + 1):
                url = _allowed(address, hosts, refused)
                async with session.get(url, allow_redirects=False) as response:
                    if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                        address = str(url.join(URL(response.headers["Location"])))
                        continue
                    if response.status != 200 or response.headers.get("Content-Encoding", "identity") != "identity":
                        raise refused(f"{url.host} answers {response.status}, expected 200 and no compression")
                    data = b""
                    async for part in response.content.iter_chunked(2**16):
                        data += part
                        if len(data) > most:
                            raise refused(f"found more than {most} bytes; make the file smaller")
                    return data
            raise refused(f"more than {REDIRECTS} redirects")
    except TimeoutError as e:
        raise refused(f"the file did not come within {SECONDS:g} seconds") from e
    except aiohttp.ClientConnectorDNSError as e:
        private = isinstance(e.__cause__, Private)
        raise refused(
            "its host has a private address" if private else "the name of its host could not be looked up"
        ) from e
    except (aiohttp.ClientError, OSError, ValueError) as e:
        raise refused(f"the file could not be fetched ({type(e).__name__})") from e


def _allowed(address: str, hosts: Collection[str], refused: Any) -> URL:
    """Read an address; APIError for a host that is not allowed, and for what a plain address does not have."""
    url = URL(address)
    host, port = (url.host or "").lower(), url.port
    known = host in hosts and port == PORTS.get(url.scheme)
    if url.scheme not in PORTS or url.user is not None or not (known or f"{host}:{port}" in hosts):
        raise refused(f"files are fetched from {', '.join(sorted(hosts))} alone, found {f'{url.scheme}://{host}'[:80]}")
    try:
        literal = not public(host)
    except ValueError:
        literal = False  # a name, which `Resolver` looks up
    if literal:
        raise refused(f"{host} is a private address")
    return url
