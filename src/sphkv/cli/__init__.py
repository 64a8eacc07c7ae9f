# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, build a config, call evaluation."""
