"""Requests that are safe to repeat: once, and the same answer each time. Stands alone, without a coordinator.

record, machine   what is stored under a key, and the pure rules of it
operation         what an operation says about keys, runs and answers
request, errors   a request with its key, and every way to be told no
store             what is asked of a database, as scripts of steps
"""
