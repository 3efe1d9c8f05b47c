"""The Tricord coordinator: decides global transactions once, durably, and drives them to their end.

The map, from the middle outwards; imports point one way, towards the middle:

    model       what a transaction is: immutable values                                   pure
    machine     everything that moves a transaction: begin, due, apply, wake_at           pure
    orders      what is asked of a stored transaction: add a branch, report, confirm, …   pure
    flow        the one loop: drive(tx, io)                                               pure but for its Io
    codec       a transaction as a row, and back
    store/      rows in SQLite or PostgreSQL, behind one interface
    journal     group commit: the saves of all live transactions, one flush at a time
    participants who there is, and where: registered, in memory and kept fresh (with registry, store/registry)
    delivery    calls to participants, by name (delivery_link: one address's stream; delivery_breaker)
    engine      live transactions, the claim loop, who waits for what
    purge       deletes what finished long ago
    server      the gRPC services: what comes in, checked; what goes out (with server_open, operator, rpc, wire, errors)
    coordinator one process, from start to stop
    workers     several of them on one address, and who watches over them (with worker, listening)
    config      settings: flags, environment, file, defaults
    check/      judges histories of transactions, by the standard library alone
    cli/        the command ``tricord``: the only place where all parts meet

The core (model, machine, orders, flow) owns: the states and every move between them; what is owed to whom and when;
what a reply means; the order "saved before sent"; back-off, deadlines and leases as numbers.

The shell (everything else) owns: clocks, randomness, threads and tasks; connections, their loss and their return;
bytes on the wire and on disk; which reply belongs to which call; who is told, and how.
"""
