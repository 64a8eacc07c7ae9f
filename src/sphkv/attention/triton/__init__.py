# SPDX-License-Identifier: Apache-2.0
"""Decode attention and encoding in Triton: any GPU that Triton compiles for."""
