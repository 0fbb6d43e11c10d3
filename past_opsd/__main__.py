"""`python -m past_opsd` is the `past` command."""

import sys

from past_opsd.cli import main

sys.exit(main())
