# SPDX-License-Identifier: Apache-2.0
"""What the host does beside a captured step in which old pages give way.

``PYTHONPATH=src python3 benchmarks/cpu_room.py --output results/cpu/room.json``

A store as a GPU's captured steps have it, of empty pages that nothing copies: rows of 128K tokens
of Llama-3.1-8B's shape at 10%. Of every row an eighth of the pages goes, a layer at a time, and the
places they leave are filled, as ``cache/rebalance.py`` does it. Processor time of one thread.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np
import torch

from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import ladder
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode
from sphkv.store.pool import EncodedPages, LayerChange, no_pages
from sphkv.store.store import PageStore
from sphkv.testing.cases import JoiningCodec

LAYERS, HEADS, SLAB_PAGES = 32, 8, 128
# part of a row's pages that goes, and pages that are moved beside a step, as refreshes have them
SHARE, MOVES = 0.12, 2048


class NoCopier:
    """Leaves bytes where they are: on a GPU a kernel copies them later."""

    def copy(self, sources, targets, num_bytes):
        pass


class Codec(JoiningCodec):
    """Has the store move pages as it does on a GPU."""

    def copier(self, device):
        return NoCopier()


def filled_store(rows, pages):
    """A store with so many rows, each with so many pages of every layer and head."""
    tiers = ladder(64, names=("k2v2", "k3v4"))
    geometry = KVGeometry(LAYERS, HEADS, 4 * HEADS, 64)
    config = StoreConfig(geometry, tiers, seal_tier="k3v4", max_slab_pages=SLAB_PAGES)
    store = PageStore(config, None, kernels=Codec(HEADS))
    layout = PageLayout(tiers.id_of("k2v2"), tiers["k2v2"], 64, PositionMode.RUNS)
    key, heads = (layout.tier_id, layout.position_mode), torch.arange(HEADS)
    heads = heads.repeat_interleave(pages)
    counts = torch.full((len(heads),), layout.page_tokens)
    blank = torch.zeros(len(heads), layout.page_bytes, dtype=torch.uint8)
    for row in range(rows):
        store.create(row)
        for layer in range(LAYERS):
            new = EncodedPages.of(key, heads, counts, blank, HEADS)
            change = LayerChange(store.table(row, layer), removed=no_pages(), pending=[new])
            store._pool.commit([change])
    return store


def refresh(store, row, random):
    """Milliseconds of dropping and of moving, for every layer of a row."""
    ids = [store.table(row, layer).all_ids() for layer in range(LAYERS)]
    gone = [each[torch.from_numpy(random.random(len(each)) < SHARE)] for each in ids]
    layers = torch.arange(LAYERS).repeat_interleave(torch.tensor([len(each) for each in gone]))
    held, times = store.hold(torch.cat(gone)), []
    for layer in range(LAYERS):
        part = (layers == layer).nonzero()[:, 0]
        began = time.process_time()
        store.drop_listed(row, layers[part], held.page_ids[part])
        dropped = time.process_time()
        store.compact(MOVES)
        times.append((1e3 * (dropped - began), 1e3 * (time.process_time() - dropped)))
    return np.array(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 7])
    parser.add_argument("--pages", type=int, default=650, help="of a head of a layer of a row")
    parser.add_argument("--commit")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for rows in args.rows:
        store, random = filled_store(rows, args.pages), np.random.default_rng(0)
        times = np.stack([refresh(store, row, random) for row in range(rows)])
        drop, move = times.mean((0, 1))
        last = float(times[-1].sum(1).mean())
        print(f"{rows} rows: {drop:.2f} ms to drop, {move:.2f} to move, {last:.2f} in the last row")
        records.append(
            {
                "rows": rows, "pages": args.pages, "drop_ms": drop, "move_ms": move,
                "last_row_ms": last, "machine": platform.machine(), "commit": args.commit,
                "versions": {"torch": torch.__version__, "numpy": np.__version__},
                "command": "PYTHONPATH=src python3 benchmarks/cpu_room.py",
            }
        )  # fmt: skip
        del store
    if args.output:
        args.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
