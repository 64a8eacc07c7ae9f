# SPDX-License-Identifier: Apache-2.0
"""Spherical KV as the cache of a transformers model."""
