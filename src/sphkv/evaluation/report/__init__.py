# SPDX-License-Identifier: Apache-2.0
"""The report page of a sweep."""
