# SPDX-License-Identifier: Apache-2.0
"""The paper's coordinates of a key and codes of their angles, to compare ours with."""
