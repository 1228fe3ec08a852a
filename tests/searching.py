"""How hard property tests search. `make test` tries the same examples each time. `make test-search` tries more of them,
others each time, and keeps what it found in .hypothesis for the next search.
"""

from __future__ import annotations

from hypothesis import settings

_USUAL, _SEARCH = 100, 1_000
"""Examples of a test that does not say how many it wants."""
settings.register_profile("repeat", max_examples=_USUAL, derandomize=True, deadline=None)
settings.register_profile("search", max_examples=_SEARCH, derandomize=False, deadline=None, print_blob=True)
settings.load_profile("repeat")


def examples(usual: int) -> int:
    """For `max_examples`: `usual` in `make test`, and as many times more in a search as other tests have."""
    return usual * settings().max_examples // _USUAL
