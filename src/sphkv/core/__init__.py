# SPDX-License-Identifier: Apache-2.0
"""Frozen data that every other part shares: geometry, tiers, budgets, contracts, configs."""
