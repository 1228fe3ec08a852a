"""The layout that a stranger states: what is not one is Malformed, and nothing else comes out of it."""

from __future__ import annotations

from typing import Any

import pytest
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import Layout
from hypothesis import given
from hypothesis import strategies as st

GOOD: list[Any] = ["a", [2, 3], "float32", "trainable", "rda", []]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**64) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(place=st.integers(0, 5), value=VALUES)
def test_whatever_is_in_place_of_a_value_the_layout_is_whole_or_malformed(place: int, value: Any) -> None:
    row = [*GOOD[:place], value, *GOOD[place + 1 :]]
    try:
        layout = Layout.from_wire([row])
    except Malformed:
        return
    assert layout.to_wire() == [row]
    assert len(layout.fingerprint) == 64


@given(VALUES)
def test_whatever_is_in_place_of_a_layout_is_malformed(rows: Any) -> None:
    with pytest.raises(Malformed):
        Layout.from_wire(rows)
