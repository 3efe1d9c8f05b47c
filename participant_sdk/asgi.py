"""The current xid in web programs: a middleware for every ASGI framework (FastAPI, Starlette, Litestar, Django, …).

    app.add_middleware(XidMiddleware)        # or, around any ASGI application: app = XidMiddleware(app)

It knows ASGI only, none of the frameworks, and binds in the application's own task, so that the xid holds to the end
of a streamed response and in what the application starts (tasks, threads of `to_thread`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

from participant_sdk.context import arrived
from participant_sdk.context_headers import MalformedHeader, read_headers, tried_header

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY_VIOLATION: Final = 1008


class XidMiddleware:
    """Binds the xid and branch id of each HTTP request and websocket while the application serves it.

    They come in the headers `tricord-xid` and `tricord-branch-id`, with a `tricord-branch-key` beside them. One that is
    malformed is answered with 400 and a problem+json body (a websocket is closed before it is accepted), and the
    application is not called. A response below 400 tells in `tricord-tried` which branches were tried before it began.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            belongs = read_headers(scope["headers"])
        except MalformedHeader as error:
            await _refuse(scope["type"], str(error), receive, send)
            return
        with arrived(belongs) as seen:

            async def send_tried(message: Message) -> None:
                if seen and message["type"] == "http.response.start" and message["status"] < 400:
                    name, value = tried_header(seen)
                    headers = [*message.get("headers", ()), (name.encode(), value.encode())]
                    message = {**message, "headers": headers}
                await send(message)

            await self._app(scope, receive, send_tried)


async def _refuse(kind: str, detail: str, receive: Receive, send: Send) -> None:
    if kind == "websocket":
        await receive()  # "websocket.connect": only after it may an application close
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": detail})
        return
    body = json.dumps({"type": "about:blank", "title": "Bad Request", "status": 400, "detail": detail}).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
