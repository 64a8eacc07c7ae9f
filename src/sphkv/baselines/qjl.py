# SPDX-License-Identifier: Apache-2.0
"""QJL: the signs of a random projection of each key, and its norm.

Zandieh et al., 2024, "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero
Overhead". With rows ``s`` of a random projection, ``sqrt(pi / 2) / m * |k| * sum sign(s k) s`` is
an unbiased estimate of the key for inner products with any query. The eight largest channels of a
prompt have a sketch of their own. Values are 2-bit integers per token in groups of 32; the newest
128 tokens wait dense.

Deviations: the sketch has a multiple of the head dim many signs in every layer (the paper: 256 of
128 channels, 512 in the first 15 layers), made of random rotations, which the paper recommends
("orthogonalised"); the key norm is float16. The outlier channels' sketch has as many signs as in
the published code: two per channel of the head, or one where the other sketch has four and more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sphkv.baselines.bit_packing import pack_bits, unpack_bits
from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.integer_codes import TokenIntegers, as_float16
from sphkv.baselines.quantised import CodedSettings
from sphkv.baselines.rotation_lloyd import random_rotation
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

BLOCK = 128
WIDTHS = ((8, 8), (6, 4), (4, 4), (4, 3), (4, 2), (2, 2), (1, 2))
"""Signs per key channel and bits of values, the best first."""

_SEED = 1


@functools.lru_cache(maxsize=64)
def sketch_rows(num_rows: int, dim: int) -> Tensor:
    """Projection ``[rows, dim]`` float32 whose blocks of ``dim`` rows are orthogonal.

    Rows have norm ``sqrt(dim)``, as Gaussian rows have on average. Cached and shared.
    """
    with torch.inference_mode(False):
        blocks = [random_rotation(dim, _SEED + index) for index in range(-(-num_rows // dim))]
        return (torch.cat(blocks)[:num_rows] * math.sqrt(dim)).contiguous()


@dataclass(frozen=True)
class SignSketch:
    """Signs and norms of keys, with large channels sketched apart.

    Attributes:
        head_dim: Channels of a head.
        ratio: Signs per channel.
        num_outliers: Channels with a sketch of their own.
    """

    head_dim: int
    ratio: int
    num_outliers: int = 8

    @property
    def label(self) -> str:
        """Signs per channel."""
        return f"{self.ratio}"

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.ratio * self.head_dim, (1 if self.ratio >= 4 else 2) * self.head_dim

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Packed signs and float16 norms of both parts, and the outlier channels."""
        index = x.abs().mean(1).topk(min(self.num_outliers, self.head_dim), dim=-1).indices
        wide = index[:, None].expand(-1, x.shape[1], -1)
        outliers = torch.zeros_like(x).scatter_(2, wide, x.gather(2, wide))
        tensors = {"channels": index.to(torch.int16)}
        for name, part, rows in zip(
            ("", "outlier_"), (x - outliers, outliers), self._sizes, strict=True
        ):
            signs = part @ sketch_rows(rows, self.head_dim).to(x.device).T > 0
            tensors[f"{name}codes"] = pack_bits(signs.to(torch.uint8), bits=1)
            norm = part.norm(dim=-1, keepdim=True)
            tensors[f"{name}norm"] = as_float16(norm, name="key norm").half()
        return tensors

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        index = tensors["channels"].long()
        is_outlier = torch.zeros(index.shape[0], 1, self.head_dim, device=index.device)
        is_outlier.scatter_(2, index[:, None], 1.0)
        restored = torch.zeros(())
        masks = (1 - is_outlier, is_outlier)
        for name, mask, rows in zip(("", "outlier_"), masks, self._sizes, strict=True):
            signs = unpack_bits(tensors[f"{name}codes"], bits=1, count=rows).float() * 2 - 1
            sketch = sketch_rows(rows, self.head_dim).to(signs.device)
            gain = tensors[f"{name}norm"].float() * (math.sqrt(math.pi / 2) / rows)
            restored = restored + signs @ sketch * gain * mask
        return restored

    def tables(self) -> list[Tensor]:
        """Both projections."""
        return [sketch_rows(rows, self.head_dim) for rows in self._sizes]


@dataclass(frozen=True)
class Qjl(CodedSettings):
    """QJL with eight outlier channels and a buffer of 128 tokens."""

    name: ClassVar[str] = "qjl"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All sketches."""
        dim = geometry.head_dim
        return [
            PairCodec(SignSketch(dim, ratio), TokenIntegers(bits, dim, 32), block_tokens=BLOCK)
            for ratio, bits in WIDTHS
        ]
