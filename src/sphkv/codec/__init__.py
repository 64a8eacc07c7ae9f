# SPDX-License-Identifier: Apache-2.0
"""Dense keys and values to packed codes, and back."""
