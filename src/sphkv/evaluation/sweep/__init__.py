# SPDX-License-Identifier: Apache-2.0
"""Grids of operating points, resumable."""
