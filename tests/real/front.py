"""A proxy before a real server that changes what it says of itself: what another build, or a disk with another clock, shows."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Change = Callable[[str, Any], Any]
"""Given a path with its query and the answer from there, returns what is told in its place."""


@contextlib.contextmanager
def front(url: str, change: Change) -> Iterator[str]:
    """The address of such a proxy."""

    class Handler(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            told = httpx.request(self.command, url + self.path, content=body, trust_env=False, timeout=30)
            content = json.dumps(change(self.path, told.json())).encode()
            self.send_response(told.status_code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _pass

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
