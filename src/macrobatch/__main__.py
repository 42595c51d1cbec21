"""`python -m macrobatch`: the same as the command `macrobatch`."""

import sys

from macrobatch.cli import main

sys.exit(main())
