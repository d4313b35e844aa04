"""What the servers of the OpenAI protocol have in common.

Every answer that is no success has the form of that protocol, with a sentence that says what to do. What an agent
cannot mend by trying again carries ``x-should-retry: false``, which OpenAI's clients heed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from penstock.backends.episodes.api import ErrorBody, ErrorReply
from penstock.backends.episodes.dialogue import ConversationError, MalformedError
from penstock.backends.episodes.sessions import GoneError, LimitError
from penstock.backends.processes.http_server import RequestError, check_token
from penstock.backends.vision.room import NoRoomError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.typedefs import Handler, Middleware


NO_RETRY: Final = {"x-should-retry": "false"}


def key_check(token: str) -> Middleware:
    """Lets those pass who name the run's token."""

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("x-api-key")  # Anthropic's clients have it there
        if not check_token(request.headers if given is None else {"Authorization": f"Bearer {given}"}, token):
            raise RequestError(
                401, "invalid_api_key", "the API key is not that of this run; it is in gateway/token of its folder"
            )
        return await handler(request)

    return check_key


def json_response(body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Failures in the form of the protocol."""
    try:
        return await handler(request)
    except RequestError as error:
        failure = error
    except GoneError as error:
        failure = RequestError(410, "session_gone", f"the session is over: {error}")
    except ConversationError as error:
        failure = RequestError(409, "conversation_changed", str(error))
    except LimitError as error:
        failure = RequestError(400, error.code, str(error))
    except NoRoomError as error:
        failure = RequestError(507, "no_room", str(error))
    except MalformedError as error:
        failure = RequestError(400, "invalid_request", str(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        failure = RequestError(error.status, error.reason.lower().replace(" ", "_"), f"{request.path}: {error.reason}")
    kind = "authentication_error" if failure.status == 401 else "invalid_request_error"
    headers = NO_RETRY if failure.status < 500 or failure.status == 507 else None
    if failure.retry_after_s:
        headers = {"Retry-After": str(failure.retry_after_s)}
    return json_response(ErrorReply(ErrorBody(failure.message, kind, failure.code)), failure.status, headers)
