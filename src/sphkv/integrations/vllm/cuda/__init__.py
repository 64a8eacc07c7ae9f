# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin on NVIDIA GPUs."""
