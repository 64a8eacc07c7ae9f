# SPDX-License-Identifier: Apache-2.0
"""Coded pages inside vLLM: a worker, an attention backend and a server that insists on both."""
