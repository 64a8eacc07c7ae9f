# SPDX-License-Identifier: Apache-2.0
"""Pages that move or go: ids follow, journals tell all, nobody is kept alive."""

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

from sphkv.store.moves import PageFollowers, PageMoves
from sphkv.store.paging import PositionMode

KEY = (1, PositionMode.RUNS)


class Owner:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[PageMoves] = []

    def remap(self, moves: PageMoves) -> None:
        self.told.append(moves)


@given(
    ids=st.lists(st.integers(-1, 3000), max_size=30),
    old=st.lists(st.integers(0, 3000), max_size=12, unique=True),
)
def test_ids_follow_as_a_dictionary_would(ids: list[int], old: list[int]) -> None:
    new = [4000 + at for at in range(len(old))]
    moves = PageMoves.of(np.array(old, dtype=np.int64), np.array(new, dtype=np.int64))
    place = dict(zip(old, new, strict=True))
    given_ids = torch.tensor(ids, dtype=torch.int64)
    assert moves.apply(given_ids).tolist() == [place.get(each, each) for each in ids]
    assert given_ids.tolist() == ids


def test_only_owners_of_these_numbers_are_told_and_none_is_kept() -> None:
    followers, first, second, gone = PageFollowers(), Owner(), Owner(), Owner()
    numbers = [followers.number_of(owner) for owner in (first, second, gone)]
    assert followers.number_of(first) == numbers[0]
    del gone
    moves = PageMoves.of(np.array([3]), np.array([5]))
    followers.remap({numbers[0], numbers[2]}, moves)
    assert (first.told, second.told) == ([moves], [])


def test_a_journal_tells_what_happened_since_it_was_read() -> None:
    followers = PageFollowers()
    journal = followers.journal()
    followers.tell_moved(KEY, np.array([30, 10]), np.array([70, 80]))
    followers.tell_gone([(KEY, np.array([9, 4]))], is_all=False)
    (moved, went), is_complete = journal.take()
    assert moved.new is not None
    assert (moved.old.tolist(), moved.new.tolist()) == ([10, 30], [80, 70])
    assert (went.old.tolist(), went.new, is_complete) == ([4, 9], None, False)
    assert journal.take() == ([], True)
    del journal
    assert not followers.has_journals
