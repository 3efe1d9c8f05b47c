"""Speed and memory, as ratios measured in one run beside an honest baseline.

``python -m benchmarks`` runs all of them, ``--only NAME`` one. Each prints a table and writes ``out/NAME.json``.
``benchmarks.report`` prints them again, ``benchmarks.compare`` holds two runs side by side, ``benchmarks.soak`` is the
long run. docs/performance.md explains the figures.
"""
