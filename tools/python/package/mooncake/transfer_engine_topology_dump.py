"""`transfer_engine_topology_dump` by the name of the original's module: `python -m` starts it."""

import sys

from mooncake.cli import topology_dump as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
