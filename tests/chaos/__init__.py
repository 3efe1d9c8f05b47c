"""Processes killed at random moments under load, and what must hold afterwards."""
