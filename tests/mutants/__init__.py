"""Mutants of the two modules that decide everything: each small fault put into them must make a test fail.

    python -m tests.mutants                    # all (`make mutants`)
    python -m tests.mutants --only TEXT        # only those whose description holds this text
    python -m tests.mutants --list             # what would be tried

`operators` makes the faults, `run` looks for a test that fails with each of them, and `equivalent` lists those with
which nothing can fail, each with the proof. Only quick and pure tests count (``run.KILLERS``), and no random search:
a rule that holds by luck alone deserves a test of its own.

Two libraries were weighed. mutmut 3 changes the bodies of functions only, so much of what matters here, the tables and
the enumerations, would stay as it is. cosmic-ray writes each mutant into the source file and starts the tests in a new
process: all that they import is loaded again for each of some 1,500, and a run that is killed leaves a broken checkout.
Neither swaps a member of an enumeration for its neighbour or the cells of a table. tests/races/mutate.py breaks the
fence's cells too, but in the running module, and plays them against real databases: no line of one would serve the
other.
"""
