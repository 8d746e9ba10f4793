"""Views that are kept."""

from __future__ import annotations

from penstock.kernels.views import MOST_VIEWS, KeptViews


def test_views_are_made_once_and_forgotten_when_there_are_too_many() -> None:
    made: list[int] = []

    def make(key: int) -> list[int]:
        made.append(key)
        return [key]

    views: KeptViews[int, list[int]] = KeptViews(make)
    first = views.of(7)
    assert views.of(7) is first
    for key in range(3 * MOST_VIEWS):
        assert views.of(key) == [key]
        assert len(views) <= MOST_VIEWS
    assert made.count(7) <= 2
    assert views.of(7) == first
