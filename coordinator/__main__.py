"""``python -m coordinator`` is the command ``tricord``."""

from .cli import main

main()
