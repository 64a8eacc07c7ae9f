# SPDX-License-Identifier: Apache-2.0
"""Witness suite and certificate of one operating point."""
