# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that users trust, run with any cache: prompts, scores, records and a board."""
