"""Bodies of requests: from bytes to what a request asks for."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from token_recycling.server.errors import ApiError
from token_recycling.server.json_limits import JsonLimitError, loads
from token_recycling.server.schemas import FieldError

B = TypeVar("B", bound=BaseModel)
NOT_SENT = "send a JSON object, with Content-Type: application/json"
# Pydantic's words for an object, and how it names the types of a union in the place of a problem.
OBJECT = re.compile(r"a valid dictionary( or instance of \w+)?")
UNION = re.compile(r"str|_NamedTool|(list|literal)\[.*\]")


def parsed(kind: type[B], content_type: str, body: bytes, context: int | None) -> B:
    """Return what a body asks for.

    Args:
        kind: of the request.
        content_type: the header.
        body: as it came.
        context: most tokens of a prompt; None: any number.

    Raises:
        ApiError: it is not JSON, beyond the limits, or not of this kind.
    """
    type_ = content_type.partition(";")[0].strip().lower()
    is_json = type_ == "application/json" or re.fullmatch(r"application/.*\+json", type_)
    if not body or not is_json:
        raise ApiError(NOT_SENT)
    try:
        return kind.model_validate(loads(body), context={"tokens": context})
    except JsonLimitError as error:
        raise ApiError(f"the JSON {error}") from error
    except ValidationError as error:
        raise _problem(error) from error
    except ValueError as error:
        raise ApiError("the body is not valid JSON", code="invalid_json") from error


def _problem(error: ValidationError) -> ApiError:
    """Return the first problem of a body in OpenAI's shape."""
    problems = error.errors(include_url=False, include_input=False)
    # Where several types are possible, the deepest problem is that of the one that was meant.
    problem: dict[str, Any] = dict(max(problems, key=lambda entry: len(entry["loc"])))
    parts = list(map(str, problem["loc"]))
    where = [part for part in parts if not UNION.fullmatch(part)]
    param = ".".join(where) or None
    kind, message, code = problem["type"], str(problem["msg"]), None
    if kind == "value_error":
        cause = problem["ctx"]["error"]
        message = str(cause)
        if isinstance(cause, FieldError):
            param, code = cause.field, cause.code
            if cause.is_unknown:
                param = ".".join([*where, cause.field])
                message = f"unrecognized request argument: {param}"
    elif not parts and kind == "model_type":
        message = NOT_SENT
    elif kind == "missing":
        message = f"{param} is missing"
    elif param:
        message = OBJECT.sub("an object", f"{param}: {message[:1].lower()}{message[1:]}")
    return ApiError(message, param=param, code=code)
