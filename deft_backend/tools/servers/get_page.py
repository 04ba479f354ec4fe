"""Read a page of a server."""

import http.client
import urllib.request


def get_page(url: str, seconds: float = 10.0) -> str | None:
    """What a server answers to a GET; None if it does not answer, or with another status than 200.

    Proxies of the environment do not count: they cannot reach this machine's loopback interface.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=seconds) as response:
            return str(response.read().decode(errors="replace")) if response.status == 200 else None
    except (http.client.HTTPException, OSError, ValueError):
        return None
