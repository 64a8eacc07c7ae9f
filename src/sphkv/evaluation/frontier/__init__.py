# SPDX-License-Identifier: Apache-2.0
"""Iso-quality frontier of measured points."""
