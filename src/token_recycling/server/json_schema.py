"""JSON schemas as they are given to llguidance: with limits that small models need."""

from __future__ import annotations

import json
from typing import Any

Schema = dict[str, Any]

ANY_OBJECT: Schema = {"type": "object"}
# Between the parts of a JSON value. Any white space would let a model write it without end.
WHITE_SPACE = r"[ \n]{0,8}"
# Keywords with which an object's properties are not all in one place, or are not limited.
OPEN = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
    *("dependentSchemas", "anyOf", "oneOf", "not", "if", "$ref"),
}


def limited(schema: Schema) -> Schema:
    """Return ``schema`` with a limit of white space, for objects without unnamed properties.

    What satisfies the result satisfies ``schema``. Where a schema says nothing, an object may have
    any further properties, and a small model adds them without end; most clients do not say
    ``additionalProperties: false``. A schema with ``allOf`` is left open, as its parts may
    describe the same object.

    Raises:
        RecursionError: it is nested too deeply.
    """
    base = schema if '"allOf"' in json.dumps(schema) else _closed(schema)
    return {**base, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(closed.get(name), dict):
            closed[name] = {key: _closed(value) for key, value in closed[name].items()}
    if isinstance(closed.get("items"), dict):
        closed["items"] = _closed(closed["items"])
    properties = closed.get("properties")
    for name in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(closed.get(name), list) and properties is None:
            closed[name] = [_closed(part) for part in closed[name]]
    required = closed.get("required", [])
    if (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and not OPEN & closed.keys()
    ):
        closed["additionalProperties"] = False
    return closed
