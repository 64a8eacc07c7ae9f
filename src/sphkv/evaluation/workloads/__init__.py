# SPDX-License-Identifier: Apache-2.0
"""The workloads: language modelling, multi-document questions, needles, tool rollouts."""
