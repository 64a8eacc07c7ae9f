# SPDX-License-Identifier: Apache-2.0
"""What only the Triton kernels promise; ``test_backends.py`` has what all do."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra sphkv[gpu])")

from sphkv.attention.api import get_backend
from sphkv.attention.plans import list_pages
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.attention.triton import backend as triton_backend
from sphkv.attention.triton.backend import TritonBackend
from sphkv.attention.triton.dense import TailList, launch_dense
from sphkv.attention.triton.rows import PartSlots, QueryRows
from sphkv.core.contract import LayerContract
from sphkv.testing.attention_cases import CASES, assert_attention, make_batch, make_request
from sphkv.testing.cases import CacheCase, build_store, random_states, rope_of

OPTIONS = AttentionOptions(scale=0.125)


def test_far_positions_turn_exactly():
    """A phase in float32 would be off by hundredths of a radian here."""
    case = CacheCase(mix="k2v3", num_tokens=0, tail_tokens=0, num_kv_heads=1)
    store, first = build_store(case), 1_900_000_000
    rope = rope_of(store)
    keys, values, query = random_states(case.geometry(), rope, 200, first=first, seed=1)
    tiers = store.config.tiers
    contract = LayerContract(
        torch.full((1, 200), tiers.id_of("k2v3"), dtype=torch.uint8),
        torch.zeros(1, 200, dtype=torch.bool),
    )
    store.write(0, 0, contract, keys, values, torch.arange(first, first + 200))
    request = DecodeRequest(store, 0, 0, query[:, -1:], torch.tensor([first + 199]), OPTIONS)
    assert_attention(request, TritonBackend(), precision="float32")


def test_a_batch_is_one_set_of_launches(monkeypatch):
    """As many as for one sequence, whatever the number of rows."""
    launched = []

    def count(name):
        launch = getattr(triton_backend, name)

        def counted(*args):
            launched.append(name)
            return launch(*args)

        monkeypatch.setattr(triton_backend, name, counted)

    for name in ("launch_pages", "launch_dense", "combine_parts"):
        count(name)
    backend, batch = TritonBackend(), make_batch(CASES["mixed tiers"])
    backend.attend_rows(batch)
    rows, launched[:] = sorted(launched), []
    backend.attend(batch.row(0))
    assert rows == sorted(launched)
    assert rows.count("launch_pages") == len(batch.store.pages(0, 0)) > 2


def test_a_new_state_written_behind_the_tail_is_attended_to_with_dense_pages():
    """What a captured step does: append where the GPU counts, then pages and tail in one launch."""
    case = CacheCase(mix="max", num_tokens=40, tail_tokens=9)
    store = build_store(case)
    rope = rope_of(store)
    keys, values, query = random_states(case.geometry(), rope, 1, first=49, seed=6)
    tails = TailList.of(store, [0], 0)
    tails.extents[:, 0] += 1
    tail = store.open_tail(0, 0)
    assert tail is not None
    tail.keys[:, tail.num_tokens], tail.values[:, tail.num_tokens] = keys[:, 0], values[:, 0]
    rows = QueryRows(query[None], torch.tensor([[49]]), 2, OPTIONS)
    parts = PartSlots.empty(rows, 1)
    ((layout, listed),) = list_pages(store, 0, 0).items()
    pages = TritonBackend().page_list(store, 0, 0, layout, [listed])
    launch_dense((pages.addresses, pages.starts), pages.layout, tails, rows, parts)
    assert store.make_room([0], num_new=1) is False
    store.absorb([0])
    request = DecodeRequest(store, 0, 0, query, torch.tensor([49]), OPTIONS)
    expected = ReferenceBackend().attend(request)
    torch.testing.assert_close(parts.output.reshape(6, 1, 64), expected.output)
    torch.testing.assert_close(parts.lse.reshape(6, 1), expected.lse)


def test_tables_are_counted_by_codec():
    backend, request = TritonBackend(), make_request(CASES["page"])
    assert backend.table_bytes(request.codec()) == 0
    backend.attend(request)
    (pages,) = [each for each in backend.plan(request.store, (0,), 0) if each.table is not None]
    assert pages.table is not None
    parts = (pages.table.entries, pages.table.points, pages.table.turns, pages.table.offsets)
    assert backend.table_bytes(request.codec()) == sum(part.nbytes for part in parts)


def test_it_has_a_name_refuses_other_precisions_and_captures_nothing():
    backend, store = get_backend("triton"), build_store(CacheCase(num_tokens=4))
    assert backend.name == "triton"
    assert backend.capture(store, [0], max_tokens=9) is None
    assert "triton" in backend.why_not(store, [0])
    with pytest.raises(ValueError, match="'bf16'"):
        TritonBackend(precision="bf16")
