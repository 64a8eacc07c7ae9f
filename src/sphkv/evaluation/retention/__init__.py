# SPDX-License-Identifier: Apache-2.0
"""Studies of the retention controller."""
