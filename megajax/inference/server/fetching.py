"""Images at addresses, fetched from the hosts that the server was told to trust, and from no others."""

import asyncio
from collections.abc import Sequence

import httpx2

SECONDS = 10.0
"""For an image, from looking up its host to its last byte."""
# Longer addresses are cut in messages.
SHOWN = 200


class Fetcher:
    """Asks hosts by their exact names, on any port. Redirects are not followed, since they may lead to other hosts."""

    def __init__(self, hosts: Sequence[str], max_bytes: int):
        """max_bytes: of the fetched images of a request together."""
        self._hosts = {host.lower() for host in hosts}
        self._max_bytes = max_bytes
        # Proxies and passwords in the environment are the operator's, and not for what clients ask for.
        self._options = dict(verify=httpx2.create_ssl_context(trust_env=False), trust_env=False, timeout=None)

    async def files(self, images: Sequence[bytes | str]) -> list[bytes]:
        """images: files, and addresses, which are fetched one after the other -> files.

        Raises ValueError for an address that is not allowed, before anything is fetched, and for one without a file
        that is small enough and arrives in time.
        """
        files = [image if isinstance(image, bytes) else b"" for image in images]
        urls = {number: self._allowed(image) for number, image in enumerate(images) if isinstance(image, str)}
        room = self._max_bytes
        # A client for each request, as it keeps cookies and connections.
        async with httpx2.AsyncClient(**self._options) as client:
            for number, url in urls.items():
                files[number] = await self._fetch(client, url, room)
                room -= len(files[number])
        return files

    def _allowed(self, address: str) -> httpx2.URL:
        """Of the parser that is also used to connect: another one could find another host in the same text."""
        try:
            url = httpx2.URL(address)
        except httpx2.InvalidURL as error:
            raise ValueError(f"messages: image_url={address.partition('?')[0][:SHOWN]!r}: {error}") from None
        name = _named(url)
        if url.scheme not in ("http", "https") or (url.port or 0) >= 2**16:
            raise ValueError(f"{name} must be data:image/TYPE;base64,DATA or an address of http or https")
        if url.userinfo:
            raise ValueError(f"{name}: the address has a user or a password, which are not sent; leave them out")
        if url.host not in self._hosts:
            raise ValueError(
                f"{name}: the host {url.host[:SHOWN]} is not in image_hosts, from which the server may fetch; send "
                f"data:image/TYPE;base64,DATA, or start the server with --image_hosts={url.host[:SHOWN]}"
            )
        return url

    async def _fetch(self, client: httpx2.AsyncClient, url: httpx2.URL, room: int) -> bytes:
        name = _named(url)
        file = bytearray()
        # What is compressed could become far larger than the limit.
        headers = {"Accept-Encoding": "identity"}
        try:
            async with asyncio.timeout(SECONDS), client.stream("GET", url, headers=headers) as answer:
                if answer.is_redirect:
                    raise ValueError(
                        f"{name}: the host {url.host} answered with a redirect ({answer.status_code}), which is not "
                        "followed; give the address to which it leads"
                    )
                if answer.status_code != httpx2.codes.OK:
                    raise ValueError(
                        f"{name}: the host {url.host} answered with status {answer.status_code}; give the address of "
                        "an image"
                    )
                async for chunk in answer.aiter_raw():
                    file += chunk
                    if len(file) > room:
                        raise ValueError(
                            f"{name}: the images that are fetched for a request may have {self._max_bytes} bytes "
                            "together, and are larger; give smaller ones"
                        )
        except TimeoutError:
            raise ValueError(
                f"{name}: the host {url.host} took longer than {SECONDS:g} s; send data:image/TYPE;base64,DATA"
            ) from None
        except httpx2.HTTPError as error:
            raise ValueError(
                f"{name}: the host {url.host} cannot be asked ({type(error).__name__}: {error}); send "
                "data:image/TYPE;base64,DATA"
            ) from None
        return bytes(file)


def _named(url: httpx2.URL) -> str:
    """For messages: without user, password, query and fragment, which may be secret."""
    path = url.raw_path.partition(b"?")[0]
    return f"messages: image_url={url.scheme}://{(url.netloc + path).decode()[:SHOWN]}"
