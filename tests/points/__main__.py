"""See ``run``."""

import sys

from tests.points.run import main

sys.exit(main())
