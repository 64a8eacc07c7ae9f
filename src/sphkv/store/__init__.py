# SPDX-License-Identifier: Apache-2.0
"""Tier-homogeneous pages: layout, allocation, pointers and exact byte accounting."""
