"""Money transfers between two banks, each with a database of its own.

bank        the participant: the code to copy from
gate        the same bank with a gate before every handler, so that a demo or a test can stop it at a certain point
processes   real processes: start, wait until ready, kill, read their logs
databases   what the coordinator's and the banks' databases say
demo        the show: ``python -m examples.transfer.demo``
"""
