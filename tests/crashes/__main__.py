"""See ``run``."""

import sys

from tests.crashes.run import main

sys.exit(main())
