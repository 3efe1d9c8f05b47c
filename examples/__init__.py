"""Runnable examples. Copy from them: they use only what the packages offer to everybody."""
