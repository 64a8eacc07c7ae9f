# SPDX-License-Identifier: Apache-2.0
"""The only importers of model libraries: loading models, plugging the cache into them."""
