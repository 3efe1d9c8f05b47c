"""Bugs of the field, planted on purpose: the simulator and the conformance suites must notice each of them."""
