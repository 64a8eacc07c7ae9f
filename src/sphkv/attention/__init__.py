# SPDX-License-Identifier: Apache-2.0
"""Attention of a query over pages, straight from codes."""
