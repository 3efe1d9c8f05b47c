"""All planted bugs."""

from __future__ import annotations

from . import decision_bugs, driving_bugs, fence_bugs, upkeep_bugs
from .bugs import Bug

CATALOGUE: tuple[Bug, ...] = (*decision_bugs.BUGS, *driving_bugs.BUGS, *fence_bugs.BUGS, *upkeep_bugs.BUGS)
