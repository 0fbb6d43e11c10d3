"""`python -m past_opsd` is the `past` command."""

import os
import sys

from past_opsd.interface.cli import main

if __name__ == "__main__":
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Everything is closed and written; torch's threads of several processes can abort what is left of the exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
