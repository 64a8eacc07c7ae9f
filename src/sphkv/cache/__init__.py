# SPDX-License-Identifier: Apache-2.0
"""The cache of a batch of sequences: dense first, then coded, under a byte budget."""
