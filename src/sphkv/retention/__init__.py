# SPDX-License-Identifier: Apache-2.0
"""From a prompt to a write contract: what to keep, and at which tier."""
