# SPDX-License-Identifier: Apache-2.0
"""Other cache methods to compare with, one per file."""
