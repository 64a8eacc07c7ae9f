# SPDX-License-Identifier: Apache-2.0
"""Notes in step with pages: what is put off is counted, and pages lose what their runs lose."""

import pytest
import torch
from tests.cache.test_rebalance import CopyingCodec, captured
from tests.cache.test_retention import GEOMETRY, NoAttention, make_engine, residency_of, run

from sphkv.cache.notes import SequenceNotes
from sphkv.retention.notes import RunNotes


def test_notes_that_were_put_off_are_counted_before_they_are_written(monkeypatch):
    monkeypatch.setattr(NoAttention, "page_codec", CopyingCodec())
    engine, graph = captured(1)
    notes = residency_of(engine)._notes
    noted = held = 0
    for _ in range(80):
        graph.step()
        held = sum(tensor.nbytes for tensor in notes.tensors())
        noted = notes.num_bytes - held
        if noted:
            break
    assert noted > 0
    assert noted % notes.run_bytes == 0
    assert notes.joined() is not None
    assert sum(tensor.nbytes for tensor in notes.tensors()) == notes.num_bytes == held + noted


def test_a_page_loses_what_its_runs_lose():
    engine = make_engine("40%", windows=(96, None))
    run(engine, 640)
    assert engine.store is not None
    notes = residency_of(engine)._notes
    pages = engine.store.page_list(0)
    places = notes.places(pages)
    assert places[pages.layer_ids == 0].max() < 0
    full = pages.select(places >= 0)
    joined = notes.joined()
    assert joined is not None
    losses = joined.losses(640)
    for page, found in zip(range(full.num_pages), notes.page_losses(full), strict=True):
        head = int(full.head_ids[page])
        mine = [losses[head, at] for at in full.runs[page].tolist() if at >= 0]
        assert found.tolist() == pytest.approx(torch.stack(mine).sum(0).tolist(), rel=1e-5)


def test_a_copy_grows_apart_and_a_loaded_one_knows_the_same():
    engine = make_engine("40%")
    run(engine, 640)
    assert engine.store is not None
    notes = residency_of(engine)._notes
    copied, loaded = (SequenceNotes(engine.config, engine.store, 0) for _ in range(2))
    copied.copy_from(notes)
    loaded.load_state(notes.state())
    runs = 640 // 16 - 1
    assert copied.drift == loaded.drift == notes.drift > 0
    copied.crop(320)
    held = [each.joined() for each in (notes, copied, loaded)]
    assert [each.num_runs for each in held if each is not None] == [runs, 20, runs]
    assert len(loaded.layers()) == GEOMETRY.num_layers
    for ours, theirs in zip(notes.layers(), loaded.layers(), strict=True):
        assert isinstance(ours, RunNotes)
        for name, tensor in ours.state().items():
            assert torch.equal(tensor, theirs.state()[name])
