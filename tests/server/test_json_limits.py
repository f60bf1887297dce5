"""The limits of JSON are those of its value, whatever its text looks like."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.server import json_limits
from token_recycling.server.json_limits import JsonLimitError, loads

TEXT = st.text(st.sampled_from('ab"\\[]{},: é\u2028'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def depth(value):
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0) if isinstance(value, (list, dict)) else 0


def size(value):
    """Commas and brackets, which is one per value or one more."""
    inner = list(value.values() if isinstance(value, dict) else value)
    nested = sum(size(one) for one in inner if isinstance(one, (list, dict)))
    return 1 + max(len(inner) - 1, 0) + nested


@given(VALUES, st.booleans())
def test_depth_and_size_are_counted(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert loads(text) == value
    if isinstance(value, (list, dict)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_limits, "MOST_DEPTH", depth(value))
            patch.setattr(json_limits, "MOST_VALUES", size(value))
            assert loads(text) == value
            patch.setattr(json_limits, "MOST_VALUES", size(value) - 1)
            with pytest.raises(JsonLimitError, match="values"):
                loads(text)
            patch.setattr(json_limits, "MOST_DEPTH", depth(value) - 1)
            with pytest.raises(JsonLimitError, match="nested"):
                loads(text)


@pytest.mark.parametrize(
    "text", [b"", b"{", b'"', b'"\\"', b"[1,]", '"a"'.encode("utf-16"), b"]" * 9]
)
def test_what_is_no_json(text):
    with pytest.raises(ValueError, match=r".") as caught:
        loads(text)
    assert not isinstance(caught.value, JsonLimitError)


def test_what_python_cannot_nest_is_refused_first():
    for text in (b"[" * 10**6, b'{"a":' * 10**6 + b"1" + b"}" * 10**6):
        with pytest.raises(JsonLimitError, match="is nested deeper than 100 levels"):
            loads(text)
