"""Serves the explorer to a browser on this machine, and to nobody else.

It listens on the loopback interface only. Every address begins with a token that is drawn anew each time, so
that other users and other pages cannot guess one; a request whose Host is not this server (a name that
somebody made lead here) is refused, and so is every method but GET. What is served is a fixed list of files
of the package and answers about the runs that were given: no path of a request ever reaches the file system.
The page may load nothing from elsewhere (Content-Security-Policy), so no request leaves the machine.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from asyncfed.errors import AsyncfedError, ScenarioError
from asyncfed.explorer.questions import BadQuestionError, UnknownQuestionError, answer
from asyncfed.explorer.runs import ExploredRun

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FOLLOW_EVERY = 1.0  # seconds
_IDLE = 20.0  # seconds until a connection on which nothing comes is closed
_AT_ONCE = 4  # answers that are computed together

PAGE = {"": "index.html"}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def static_files() -> dict[str, bytes]:
    """What the page is made of, by name."""
    folder = resources.files("asyncfed.explorer") / "static"
    return {
        file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES
    }


class ExplorerServer(ThreadingHTTPServer):
    """Answers about some runs until it is shut down; `url` is where."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, runs: Sequence[ExploredRun], port: int = 0) -> None:
        self.runs, self.files = list(runs), static_files()
        self.token = secrets.token_urlsafe(24)
        self.computing = threading.BoundedSemaphore(_AT_ONCE)
        self._ended = threading.Event()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ScenarioError(
                f"cannot listen on port {port} of this machine ({error.strerror}); give another --port, "
                "or none"
            ) from error
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self._follower = threading.Thread(target=self._follow, name="asyncfed-explorer", daemon=True)
        self._follower.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def server_close(self) -> None:
        self._ended.set()
        super().server_close()
        self._follower.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def _follow(self) -> None:
        """Take up what the runs have recorded, and again and again what they have since."""
        while True:
            for run in self.runs:
                run.follow(self._ended.is_set)
                if self._ended.is_set():
                    return
            if self._ended.wait(FOLLOW_EVERY):
                return


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    protocol_version = "HTTP/1.1"
    server_version = "asyncfed"
    sys_version = ""
    timeout = _IDLE

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name")
        address = urlsplit(self.path)
        token, _, path = address.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._refuse(HTTPStatus.FORBIDDEN, "open the address that `asyncfed view` printed")
        if path.startswith("api/"):
            return self._answer(path.removeprefix("api/"), address.query)
        name = PAGE.get(path, path)
        if name not in self.server.files:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        return self._send(HTTPStatus.OK, TYPES[name.rpartition(".")[2]], self.server.files[name])

    def _answer(self, path: str, query: str) -> None:
        try:
            with self.server.computing:
                kind, content = answer(self.server.runs, path, query)
        except UnknownQuestionError as error:
            return self._refuse(HTTPStatus.NOT_FOUND, str(error))
        except BadQuestionError as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (AsyncfedError, OSError) as error:
            return self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except Exception as error:  # of ours, or of a file that is damaged in a new way: the page says so
            return self._refuse(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"unexpected {type(error).__name__}: {error}"
            )
        return self._send(HTTPStatus.OK, kind, content)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True
        self._send(status, "text/plain; charset=utf-8", f"{why}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of a method that is not GET, a line that is too long, and other things no browser of ours sends."""
        known = HTTPStatus(code) if code != HTTPStatus.NOT_IMPLEMENTED else HTTPStatus.METHOD_NOT_ALLOWED
        self._refuse(
            known, "only GET is answered" if known == HTTPStatus.METHOD_NOT_ALLOWED else known.phrase
        )

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for a request."""
