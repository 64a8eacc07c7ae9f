// SPDX-License-Identifier: Apache-2.0
// Which head, and which of its pages, a thread block has. Blocks of a launch may find it themselves; that
// takes as long as a few pages, so where lists stay from step to step it is found once, by a kernel.
#pragma once
#include "ptx.cuh"

// What blocks are shared by.
struct Sharing {
  const int* row_start;  // [kv_heads * batch + 1] into the list of pages
  int batch, kv_heads;
  int ctas;         // blocks of all heads
  int uneven;       // share them by the pages of each head, else alike
  int row_pages;    // what a row costs beside its pages, in pages
  int least_pages;  // of a head, for each block of it that has any
};

// Bits below bit `n`, which may lie outside the word.
INLINE uint32_t bits_below(int n) { return n <= 0 ? 0u : n >= 32 ? ALL_LANES : (1u << n) - 1u; }

// Steps of a loop in which every lane takes one of `count`, as a number of lanes.
INLINE int lanes_for(int count) { return (count + 31) / 32 * 32; }

INLINE int pages_of_head(const Sharing& p, int head) {
  if (head >= p.kv_heads) return 0;
  return __ldg(p.row_start + (head + 1) * p.batch) - __ldg(p.row_start + head * p.batch);
}

// Which head a block has, and which of the head's blocks it is.
struct BlockPlace {
  int head, cta, ctas, parts;
  int work;  // of the head: its pages and what its rows cost beside them, in pages

  // Blocks of all heads one after the other, last one first: a block waits for blocks of its head with
  // later pages, so they must begin before it. Heads share the blocks so that none has more work than
  // it must; blocks that no head has a use for, and heads without pages, are left over.
  INLINE BlockPlace(const Sharing& p, int block, int lane) {
    const int heads = p.kv_heads, at = p.ctas - 1 - block;
    if (!p.uneven) {
      ctas = p.ctas / heads;
      head = heads - 1 - block % heads, cta = ctas - 1 - block / heads;
      parts = head * (p.batch + ctas);
      work = pages_of_head(p, head);
      return;
    }
    const int lanes_work = work_of(p, lane, lane), most = most_work(p, lanes_work, lane);
    head = heads - 1, cta = at, ctas = 0, work = 0;
    int before = 0;
    for (int h = lane; h < lanes_for(heads); h += 32) {
      const int all = h < 32 ? lanes_work : work_of(p, h, lane);
      const int own = blocks_of(all, most), end = before + sum_up_to(own, lane);
      const uint32_t behind = __ballot_sync(ALL_LANES, end > at);
      if (behind) {
        const int owner = __ffs(behind) - 1;
        head = h - lane + owner;
        work = __shfl_sync(ALL_LANES, all, owner);
        ctas = __shfl_sync(ALL_LANES, own, owner);
        cta = at - __shfl_sync(ALL_LANES, end, owner) + ctas;
        break;
      }
      before = __shfl_sync(ALL_LANES, end, 31);
    }
    parts = head * p.batch + at - cta;
  }

  // Pages of a head, which differs from lane to lane, and what its rows that have some cost beside; the
  // first is free, for every block begins one.
  static INLINE int work_of(const Sharing& p, int head, int lane) {
    const int rows = p.kv_heads * p.batch, first = head * p.batch;
    int filled = 0;
    for (int k = 0; k < rows; k += 32) {
      const int at = k + lane;
      const bool has_pages = at < rows && __ldg(p.row_start + at + 1) > __ldg(p.row_start + at);
      const uint32_t mine = bits_below(first + p.batch - k) & ~bits_below(first - k);
      filled += __popc(__ballot_sync(ALL_LANES, has_pages) & mine);
    }
    return pages_of_head(p, head) + p.row_pages * max(filled - 1, 0);
  }

  // Blocks of a head if none has more work than `most`.
  static INLINE int blocks_of(int work, int most) {
    return (uint32_t)(work + most - 1) / (uint32_t)most;
  }

  // Least work a block can have at most. If it were only for the sum, that would be all work by
  // blocks; but a head's last block may have less than others, so that somewhat more is needed.
  static INLINE int most_work(const Sharing& p, int lanes_work, int lane) {
    int longest = 1, total = 0;
    for (int h = lane; h < lanes_for(p.kv_heads); h += 32) {
      const int all = h < 32 ? lanes_work : work_of(p, h, lane);
      longest = max(longest, __reduce_max_sync(ALL_LANES, all));
      total += __reduce_add_sync(ALL_LANES, all);
    }
    const int rest = p.ctas - p.kv_heads;
    int low = max((uint32_t)(total + p.ctas - 1) / (uint32_t)p.ctas, 1u);
    int high = rest > 0 ? min(longest, (int)((uint32_t)(total + rest - 1) / (uint32_t)rest)) : longest;
    while (low < high) {
      const int middle = (low + high) / 2;
      int blocks = 0;
      for (int h = lane; h < lanes_for(p.kv_heads); h += 32) {
        const int all = h < 32 ? lanes_work : work_of(p, h, lane);
        blocks += __reduce_add_sync(ALL_LANES, blocks_of(all, middle));
      }
      if (blocks <= p.ctas) high = middle;
      else low = middle + 1;
    }
    return max(low, 1);
  }

  static INLINE int sum_up_to(int own, int lane) {
#pragma unroll
    for (int k = 1; k < 32; k *= 2) {
      const int other = __shfl_up_sync(ALL_LANES, own, k);
      if (lane >= k) own += other;
    }
    return own;
  }
};

// A head's pages in the list, and how many blocks share them. Pages are told apart by their place in
// the head's work, in which every row but the first begins with what it costs beside its pages.
struct HeadPages {
  const int* rows;
  int batch, work, ctas;
  int row_pages;  // what a row costs

  INLINE HeadPages(const Sharing& p, int head, int work, int most)
      : rows(p.row_start + head * p.batch), batch(p.batch), work(work),
        row_pages(p.uneven ? p.row_pages : 0) {
    ctas = min(most, (rows[batch] - rows[0] + p.least_pages - 1) / p.least_pages);
  }

  // Where the work of block `cta` begins. 32 bits: a head's work times blocks stays far below 2^32.
  INLINE int bound(int cta) const { return (uint32_t)(cta * work) / max(ctas, 1); }

  // First page of block `cta` in the list; all lanes of a warp find it together.
  INLINE int first(int cta, int lane) const {
    const int start = rows[0], end = bound(cta);
    if (row_pages == 0) return start + end;
    int pages = start, filled = 0;
    for (int b = lane; b < lanes_for(batch); b += 32) {
      const int from = rows[min(b, batch)], count = rows[min(b + 1, batch)] - from;
      const uint32_t live = __ballot_sync(ALL_LANES, count > 0);
      const int rank = filled + __popc(live & (2u << lane) - 1u) - 1;
      const int before = end - (from - start) - row_pages * rank;
      pages += __reduce_add_sync(ALL_LANES, min(max(before, 0), count));
      filled += __popc(live);
    }
    return pages;
  }

  // Index of the block that has page `at` of the list, in row `rank` of those that have pages.
  INLINE int owner(int at, int rank) const {
    return (int)((uint32_t)((at - rows[0] + row_pages * rank + 1) * ctas - 1) / work);
  }
};

// First row with pages at or behind `start`; all lanes of a warp find it together.
INLINE int first_row(const int* rows, int batch, int start, int lane) {
  int index = 0;
  for (int b = lane; b < lanes_for(batch); b += 32)
    index += __popc(__ballot_sync(ALL_LANES, b < batch && rows[b + 1] <= start));
  return index;
}

// Rows with pages before row `index`; all lanes of a warp find it together.
INLINE int row_rank(const int* rows, int index, int lane) {
  int rank = 0;
  for (int b = lane; b < lanes_for(index); b += 32)
    rank += __popc(__ballot_sync(ALL_LANES, b < index && rows[b + 1] > rows[b]));
  return rank;
}

// All that a block must know before it asks for anything.
struct __align__(16) BlockShare {
  int head, cta, ctas, parts;  // see BlockPlace
  int work, first, end;        // of the head; pages of the list that the block has
  int row;                     // that of the first of them,
  int rank;                    // among the rows of the head that have pages,
  int row_end;                 // and where it ends
  int unused[2];

  INLINE BlockShare() {}

  INLINE BlockShare(const Sharing& p, int block, int lane) {
    const BlockPlace place(p, block, lane);
    head = place.head, cta = place.cta, ctas = place.ctas, parts = place.parts, work = place.work;
    const HeadPages pages(p, head, work, ctas);
    first = pages.first(cta, lane);
    end = cta < pages.ctas ? pages.first(cta + 1, lane) : first;
    row = first_row(pages.rows, p.batch, first, lane);
    rank = row_rank(pages.rows, row, lane);
    row_end = pages.rows[min(row + 1, p.batch)];
  }

  static INLINE BlockShare load(const int* shares, int block) {
    const int4* from = (const int4*)shares + 3 * block;
    const int4 a = __ldg(from), b = __ldg(from + 1), c = __ldg(from + 2);
    BlockShare share;
    share.head = a.x, share.cta = a.y, share.ctas = a.z, share.parts = a.w;
    share.work = b.x, share.first = b.y, share.end = b.z, share.row = b.w;
    share.rank = c.x, share.row_end = c.y;
    return share;
  }

  INLINE void store(int* shares, int block) const {
    int4* to = (int4*)shares + 3 * block;
    to[0] = {head, cta, ctas, parts};
    to[1] = {work, first, end, row};
    to[2] = {rank, row_end, 0, 0};
  }
};
