# SPDX-License-Identifier: Apache-2.0
"""What is computed from measurements: quality, stability, and how sure we are."""
