"""The local explorer: one model, fixed at start; texts come from the page, numbers go back.

Safe by default: it listens on this machine alone, answers only to its own names (a page elsewhere
that points its name here is refused), takes no path and no address from the browser, and every
answer carries a policy under which nothing but its own files can run. Bound elsewhere, it asks for
a token that the printed address holds. Everything goes through `Guard`, errors included.
"""

import asyncio
import hashlib
import ipaddress
import json
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from scaledot import ScaledotError, report
from scaledot.document import dump
from scaledot.exploring import Explorer, Progress, Reading, Stopped, read
from scaledot.page_document import (
    explore_document,
    head_arrays,
    layer_arrays,
    layers_document,
    result_arrays,
)

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

LARGEST = 1 << 19
"""Bytes of a request, at most."""

TEXTS = 8
"""Texts that are kept for comparison; the one that was not looked at for longest goes first."""

MEMORY = 2 << 30
"""Bytes that their queries, keys and values may take together; the last one stays in any case."""

WAITING = 8
"""Requests that may wait for the model."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
    "cache-control": "no-store",
}
"""What every answer carries."""


class Refused(Exception):
    """A request that is not answered: its status, one sentence, and what else the page is told."""

    def __init__(self, status: int, sentence: str, **about: str | int) -> None:
        super().__init__(sentence)
        self.status, self.about = status, about


class Shelf:
    """The texts that are kept, by id, and the one that runs through the model."""

    def __init__(
        self, explorer: Explorer, commands: Callable[[str], Mapping[str, str] | None] | None = None
    ) -> None:
        self.explorer = explorer
        self.commands = commands
        self._kept: dict[str, Reading] = {}
        self._count = 0
        self._run = secrets.token_hex(3)
        self._lock = threading.Lock()
        self._running: tuple[float, int] | None = None
        self._measured: list[dict[str, Any]] = []
        self._watched = False
        self._stop = threading.Event()
        self._keep = True

    def put(self, text: str) -> str:
        """Read a text and keep it; its id. One that is kept already keeps its id.

        Only one thread may call this: the model runs once at a time.

        Raises: as `read`; Stopped after `stop(keep=False)`.
        """
        for id, reading in list(self._kept.items()):
            if reading.text == text and reading.complete:
                return self._placed(id, reading)
        self._stop.clear()
        self._running = (time.monotonic(), 0)
        self._measured, self._watched = [], False
        try:
            reading = read(self.explorer, text, on_layer=self._at)
        finally:
            self._running = None
        if not reading.complete and not self._keep:
            raise Stopped
        self._count += 1
        # A page of an earlier run must not be answered with another text of the same number.
        return self._placed(f"t{self._count}_{self._run}", reading)

    def stop(self, *, keep: bool = True) -> None:
        """Stop the text that runs after its present layer; keep what is done."""
        self._keep = keep
        self._stop.set()

    def progress(self, first: int = 0) -> dict[str, Any]:
        """How far the text that runs is, with its measured layers from `first` on, those of the
        document; layers is None where none runs.

        A run that nobody asks about is not slowed by it: layers come from the second asking on.
        """
        running = self._running
        self._watched = True
        return {
            "layers": None if running is None else running[1],
            "of": len(self.explorer.paths),
            "seconds": 0.0 if running is None else time.monotonic() - running[0],
            "measured": [] if running is None else self._measured[max(first, 0) :],
        }

    def get(self, id: str) -> Reading:
        with self._lock:
            if id not in self._kept:
                raise Refused(410, f"the text {id[:20]!r} is not kept any more: send it again")
            self._kept[id] = reading = self._kept.pop(id)
            return reading

    def document(self, *ids: str) -> dict[str, Any]:
        """The page's document of these texts, of all kept without any id, in their order."""
        with self._lock:
            kept = dict(self._kept)
        wanted = ids or sorted(kept, key=lambda id: int(id[1:].partition("_")[0]))
        readings = {id: kept[id] for id in wanted if id in kept}
        return explore_document(self.explorer.about, readings, commands=self.commands)

    def news(self, after: str) -> dict[str, Any]:  # noqa: ARG002
        """What came after this mark, of a document that grows by itself."""
        raise Refused(404, "there is no time line here")

    def _at(self, progress: Progress) -> None:
        assert self._running is not None  # called from `put`
        if self._watched:
            found = progress.since(len(self._measured))
            width = self.explorer.about["d_model"]
            self._measured = [*self._measured, *layers_document(*found, width)]
        self._running = (self._running[0], progress.layers)
        if self._stop.is_set():
            raise Stopped

    def _placed(self, id: str, reading: Reading) -> str:
        with self._lock:
            self._kept.pop(id, None)
            self._kept[id] = reading
            while len(self._kept) > 1 and (
                len(self._kept) > TEXTS or sum(x.bytes for x in self._kept.values()) > MEMORY
            ):
                del self._kept[next(iter(self._kept))]
        return id


class Guard:
    """What stands before everything: names, token, origin, and the headers of every answer."""

    def __init__(self, app: Any, names: tuple[str, ...] | None, token: str | None) -> None:
        self.app = app
        self.names = names
        self.token = token
        digest = hashlib.sha256((token or "").encode()).hexdigest()
        self._cookie = f"scaledot-{digest[:12]}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(k, v) for k, v in message["headers"] if k.decode().lower() not in HEADERS]
                fixed = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*own, *fixed]}
            await send(message)

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        try:
            entered = self._check(scope, headers)
        except Refused as refused:
            await _answer(guarded, refused.status, {"error": str(refused)})
            return
        if entered:
            # The token goes from the address into a cookie: an address is shown, kept and sent on.
            cookie = f"{self._cookie}={self.token}; HttpOnly; SameSite=Lax; Path=/"
            await _answer(guarded, 303, {}, {"location": "/", "set-cookie": cookie})
            return
        await self.app(scope, receive, guarded)

    def _check(self, scope: Any, headers: Mapping[str, str]) -> bool:
        """Refuse what is not for us; whether the request brings the token in its address."""
        host = _name(headers.get("host", ""))
        if self.names is not None and host not in self.names:
            raise Refused(400, "this page is not served under that name: open the printed address")
        site = headers.get("sec-fetch-site", "same-origin")
        inner = scope["path"] != "/" or scope["method"] not in ("GET", "HEAD")
        origin = headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        if inner and (site not in ("same-origin", "none") or foreign):
            raise Refused(403, "only the page itself may ask: open the printed address")
        if self.token is None:
            return False
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and _equal(asked, self.token):
            return True
        cookies = dict(x.strip().partition("=")[::2] for x in headers.get("cookie", "").split(";"))
        given = (cookies.get(self._cookie, ""), headers.get("x-scaledot-token", ""))
        if not any(_equal(x, self.token) for x in given):
            raise Refused(401, "this address lacks its token: open it as the terminal printed it")
        return False


def require() -> Any:
    """FastAPI. Raises ScaledotError, with the line that installs it, where it is not there."""
    try:
        import fastapi
        import fastapi.exceptions
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ScaledotError(f'{error.name} is not installed: pip install "scaledot[web]"') from None
    return fastapi


def application(shelf: Shelf, *, names: tuple[str, ...] | None, token: str | None) -> Guard:
    """The explorer as an ASGI application.

    names: what the Host header may say, None for anything, which then needs a token.

    Raises: ScaledotError if FastAPI is not installed.
    """
    assert names is not None or token is not None
    fastapi = require()
    # FastAPI reads the annotations below, so they are real names here.
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    api: "FastAPI" = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    line = asyncio.Lock()
    waiting = [0]
    worker = ThreadPoolExecutor(1, "model")

    async def refused(_: Any, error: Any) -> Response:  # no thread: its request may be cancelled
        return _json({"error": str(error), **error.about}, error.status)

    def unknown(_: Any, error: Any) -> Response:
        said = {404: "there is nothing here", 405: "this address is not asked that way"}
        sentence = said.get(error.status_code, "this request cannot be answered")
        return _json({"error": sentence}, error.status_code)

    def unreadable(_: Any, error: Any) -> Response:
        where = error.errors()[0]["loc"][-1]
        return _json({"error": f"{where} is not a whole number"}, 422)

    def failed(_: Any, error: Exception) -> Response:
        traceback.print_exception(error)
        name = type(error).__name__
        return _json({"error": f"it failed with {name}: the terminal shows where"}, 500)

    api.add_exception_handler(Refused, refused)
    api.add_exception_handler(HTTPException, unknown)
    api.add_exception_handler(fastapi.exceptions.RequestValidationError, unreadable)
    api.add_exception_handler(Exception, failed)

    @api.post("/api/texts")
    async def _post(request: Request) -> Response:
        text = await _text(request)
        if waiting[0] >= WAITING:
            raise Refused(429, "the model is busy: wait for the texts before this one")
        waiting[0] += 1
        try:
            async with line:
                return _json(await _through(request, worker, shelf, text))
        except asyncio.CancelledError:
            raise Refused(503, "scaledot explore was ended") from None
        finally:
            waiting[0] -= 1

    @api.get("/api/document")
    def _all() -> Response:
        return _json(shelf.document())

    @api.get("/api/timeline")
    def _news(after: str = "") -> Response:
        return _json(shelf.news(after))

    @api.get("/api/texts/{id}")
    def _one(id: str) -> Response:
        shelf.get(id)
        return _json(shelf.document(id))

    @api.get("/api/texts/{id}/heads/{layer}/{head}")
    def _head(id: str, layer: int, head: int) -> Response:
        return _found(lambda: head_arrays(shelf.get(id), layer, head))

    @api.get("/api/texts/{id}/layers/{layer}")
    def _layer(id: str, layer: int) -> Response:
        return _found(lambda: layer_arrays(shelf.get(id), layer))

    @api.get("/api/texts/{id}/layers/{layer}/result")
    def _result(id: str, layer: int, first: int, last: int) -> Response:
        return _found(lambda: result_arrays(shelf.get(id), layer, first, last))

    @api.get("/api/progress")
    def _progress(first: int = 0) -> Response:
        return _json(shelf.progress(first))

    @api.post("/api/stop")
    def _stop() -> Response:
        shelf.stop()
        return _json(shelf.progress())

    @api.get("/")
    def _page() -> Response:
        return _file("index.html")

    @api.get("/{name}")
    def _static(name: str) -> Response:
        return _file(name)

    return Guard(api, names, token)


async def _text(request: "Request") -> str:
    """The text that a request brings, read no further than `LARGEST`."""
    from starlette.requests import ClientDisconnect

    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refused(415, 'send {"text": "…"} as application/json')
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > LARGEST:
                raise Refused(413, f"the text is too long: at most {LARGEST >> 10} KiB are read")
    except ClientDisconnect:
        raise Refused(409, "nobody waits for this text any more") from None
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not isinstance(given.get("text"), str):
        raise Refused(422, 'send {"text": "…"}: one text as JSON')
    return given["text"]


async def _through(
    request: "Request", worker: ThreadPoolExecutor, shelf: Shelf, text: str
) -> dict[str, Any]:
    """A text through the model, off the event loop; stopped when nobody waits for it any more."""

    def work() -> dict[str, Any]:
        return shelf.document(shelf.put(text))

    if await request.is_disconnected():
        raise Refused(409, "nobody waits for this text any more")
    running = asyncio.get_running_loop().run_in_executor(worker, work)
    while not running.done():
        await asyncio.wait({running}, timeout=0.05)
        if not running.done() and await request.is_disconnected():
            shelf.stop(keep=False)
            break
    try:
        return await running
    except ScaledotError as error:
        raise Refused(422, str(error)) from None
    except Stopped:
        raise Refused(409, "stopped before the first layer was done") from None


def _found(arrays: Callable[[], dict[str, Any]]) -> "Response":
    try:
        return _json(arrays())
    except LookupError as error:
        raise Refused(404, str(error)) from None


def _file(name: str) -> "Response":
    """One of the page's own files, looked up by name among those that are there."""
    from starlette.responses import Response

    known = report.files()
    if name not in known:
        raise Refused(404, "there is nothing here")
    return Response(known[name].read_bytes(), media_type=report.TYPES[known[name].suffix])


def _json(x: Mapping[str, Any], status: int = 200) -> "Response":
    from starlette.responses import Response

    return Response(dump(x), status, media_type="application/json")


async def _answer(
    send: Any, status: int, x: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    body = dump(x) if x else b""
    given = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    coded = [(k.encode(), v.encode()) for k, v in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": coded})
    await send({"type": "http.response.body", "body": body})


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _equal(a: str, b: str) -> bool:
    return secrets.compare_digest(a.encode("utf-8", "replace"), b.encode())


# Listening


def serve(
    shelf: Shelf,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the page until Ctrl-C; port 0 is any free one. on_ready is given the page's address.

    Raises: ScaledotError if the port is taken, the host is not one of this machine, or FastAPI is
    not installed.
    """
    local = _is_loopback(host)
    names = (*LOOPBACK, _bracketed(host).lower()) if local else None
    token = None if local else secrets.token_urlsafe(24)
    app = application(shelf, names=names, token=token)
    import uvicorn

    listening = _listen(host, port)
    everywhere = host in ("0.0.0.0", "::")
    shown = socket.gethostname() if everywhere else _bracketed(host)
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    if token is not None:
        address += f"?token={token}"
    # The access log would show the token; the server's name and version are nobody's business.
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, date_header=False,
        timeout_graceful_shutdown=2, lifespan="off",
    )  # fmt: skip

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            shelf.stop(keep=False)  # nobody waits for what the model runs
            super().handle_exit(sig, frame)

    server = Server(config)
    if on_ready is not None:
        threading.Thread(
            target=_once_started, args=(server, address, on_ready), daemon=True
        ).start()
    with listening:
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            pass
        finally:
            shelf.stop(keep=False)


def _once_started(server: Any, address: str, on_ready: Callable[[str], None]) -> None:
    while not server.started:
        if server.should_exit:
            return
        time.sleep(0.01)
    on_ready(address)


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, place = found[0]
        listening = socket.socket(family, kind, proto)
    except (OSError, OverflowError, UnicodeError):
        raise ScaledotError(
            f"no host {host!r} here: pass 127.0.0.1 or a name of this machine"
        ) from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(place)
        listening.listen(128)
    except OSError as error:
        listening.close()
        why = (error.strerror or str(error)).lower()
        raise ScaledotError(
            f"cannot listen on {host}:{port}: {why}; without --port a free one is taken"
        ) from None
    return listening


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
