# SPDX-License-Identifier: Apache-2.0
"""One model, its prompts and methods, measured case by case."""
