# SPDX-License-Identifier: Apache-2.0
"""Decode kernels for NVIDIA Hopper GPUs."""
