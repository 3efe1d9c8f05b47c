"""Speed and memory, as ratios measured in one run beside an honest baseline.

``python -m benchmarks`` runs all of them, ``--only NAME`` one. Each prints a table and writes ``out/NAME.json``.
"""
