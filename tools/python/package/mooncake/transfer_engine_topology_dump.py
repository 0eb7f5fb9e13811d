"""`transfer_engine_topology_dump` under the name of Mooncake's module, started by `python -m`."""

import sys

from mooncake.cli import topology_dump as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
