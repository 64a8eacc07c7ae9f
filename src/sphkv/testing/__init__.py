# SPDX-License-Identifier: Apache-2.0
"""Cases, comparators and tiny random models for tests and benchmarks."""
