# SPDX-License-Identifier: Apache-2.0
"""Workloads, metrics, records and frontiers: what a setting costs and what it keeps."""
