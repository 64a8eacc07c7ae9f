# SPDX-License-Identifier: Apache-2.0
"""``python -m sphkv`` is the ``sphkv`` command."""

from sphkv.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
