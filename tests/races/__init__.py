"""Calls for one branch that meet in every order, with connections and processes lost at every step.

    python -m tests.races.run --database all --rounds 10000 --seed N

Each round lets two to four calls race on a real database, from two instances of one participant. A scheduler decides
which of them takes its next step, so that orders come up which no amount of load would hit; faults are laid where
they hurt. Afterwards the story is finished as a coordinator would, and everything is held against a model of the
fence that shares no code with it.

    schedule    who takes the next step; notices who waits for a lock
    faults      what goes wrong, and where
    actor       one call in a race: where it stops, what strikes it there
    watch       the SDK's code, wrapped from outside so that its steps are such points
    bank        the participant: its engines, handlers, accounts, for threads and for asyncio
    model       the table of the design once more, and the search for an order that explains all answers
    stories     which calls meet, what came before them, and every combination that has to come up
    play        one round, its end and its verdict
    killed      rounds of real processes that die by SIGKILL
    run         many rounds in many processes
    mutate      every cell of the fence's tables broken on purpose: who notices?
"""
