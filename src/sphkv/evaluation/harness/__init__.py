# SPDX-License-Identifier: Apache-2.0
"""The one way in which a cache is measured inside a model."""
