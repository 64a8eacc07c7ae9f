# SPDX-License-Identifier: Apache-2.0
"""Keys as asymmetric integers per token after a Hadamard rotation: the QuaRot form."""

from dataclasses import dataclass

from torch import Tensor

from sphkv.baselines.per_channel_int import (
    asymmetric_integers,
    check_bits,
    check_head_dim,
    check_keys,
)
from sphkv.codec.hadamard import rotate, unrotate

_METADATA_BITS = 2 * 16


@dataclass(frozen=True, slots=True)
class HadamardInt:
    """Round-trip of keys through rotated per-token integers.

    The rotated key spans ``2**bits`` equal levels from its smallest to its largest entry, with
    that minimum and the level spacing kept as float16.

    Deviations from QuaRot (Ashkboos et al., 2024): one group per head instead of groups of 128
    channels, no clipping of the range, and for head dims that are no power of two the rotation
    of ``sphkv.codec.hadamard``. Weights and activations are left alone.

    Attributes:
        bits: Bits per entry, 1 to 8.
    """

    bits: int

    def __post_init__(self) -> None:
        """Reject widths that cannot be coded."""
        check_bits(self.bits)

    def bits_per_element(self, head_dim: int) -> float:
        """Bits per key entry, minimum and spacing included."""
        check_head_dim(head_dim)
        return self.bits + _METADATA_BITS / head_dim

    def roundtrip(self, x: Tensor) -> Tensor:
        """Keys as they would come back.

        Args:
            x: ``[heads, tokens, head_dim]`` floating point.

        Returns:
            ``[heads, tokens, head_dim]`` float32.

        Raises:
            ValueError: On another shape or dtype, or entries that are not finite or exceed
                float16.
        """
        check_keys(x)
        if x.numel() == 0:
            return x.float()
        return unrotate(asymmetric_integers(rotate(x), bits=self.bits, dim=-1))
