"""Bugs in who drives a transaction, and in what is stored of it."""

from __future__ import annotations

from .bugs import Bug, Edit, Suite

FLOW = "coordinator/flow.py"
MACHINE = "coordinator/machine.py"
ENGINE = "coordinator/engine.py"
POSTGRES = "coordinator/store/postgres.py"
FLUSH = "coordinator/store/postgres_flush.py"
STORE = Suite(("tests/contract/test_store.py",), "postgresql")
STORIES = Suite(("tests/stories/test_stories.py",))

BUGS = (
    Bug(
        "after a lost COMMIT another's row is taken for the own one",
        "pitfall 12: convex#559, FDB commit_unknown_result (read back by version alone)",
        (
            Edit(
                FLOW,
                "        if stands.save_id == mine.save_id:\n            self._tx = stands",
                "        if stands.version == mine.version:\n            self._tx = mine",
            ),
        ),
    ),
    Bug(
        "replies and orders are dropped when their save was refused",
        "case 20: a wrong success; rule A6 (replies and orders are applied again to the row that stands)",
        (
            Edit(
                FLOW,
                "                    self._send([call_of(self._tx, branch, now_ms, policy) for branch in added])\n"
                "                break\n",
                "                    self._send([call_of(self._tx, branch, now_ms, policy) for branch in added])\n"
                "            break\n",
            ),
        ),
        STORIES,
    ),
    Bug(
        "whoever meets a transaction drives it",
        "case 12: hmily#71, seata#7090; pitfall 24 (two scanners call the same branch)",
        (Edit(FLOW, "        if not self._owner:\n            return []\n", ""),),
    ),
    Bug(
        "the lease is shorter than a call",
        "case 13: hmily#109, dbos-transact-java#491 (the scan adopts what is being driven)",
        (
            Edit(
                MACHINE,
                "    end_ms = now_ms + max(policy.lease_ms, longest_ms)",
                "    end_ms = now_ms + min(policy.lease_ms, longest_ms) // 8",
            ),
            Edit(
                MACHINE,
                "        enough_ms = now_ms + policy.longest_call_of(tx.spec) + policy.lease_margin_ms",
                "        enough_ms = now_ms",
            ),
            Edit(
                FLOW,
                "            if calls and not renewed and not self._outlasts(calls, now_ms):",
                "            if calls and not renewed and now_ms < 0:",
            ),
        ),
    ),
    Bug(
        "another request under a key gets the first one's answer",
        "case 40: Truxify#3539, #2387; pitfall 9",
        (Edit(ENGINE, "            elif not begun.tx.asks_the_same(spec):", "            elif False:"),),
    ),
    Bug(
        "the count of attempts is kept in memory",
        "pitfall 22: EasyTransaction (a storm of calls after each restart)",
        (
            Edit(
                "coordinator/codec.py",
                "    steps = [_short(step) for step in tx.steps]",
                "    steps = [_short(step._replace(attempts=0)) for step in tx.steps]",
            ),
        ),
    ),
    Bug(
        "one branch that fails holds the others up",
        "case 16: EasyTransaction#83, dtm#207",
        (
            Edit(
                MACHINE,
                "    phase = wanted(tx, branch, tx.steps[branch])\n",
                "    phase = wanted(tx, branch, tx.steps[branch])\n"
                "    if tx.state is not State.TRYING and any(wanted(tx, n, tx.steps[n]) for n in range(branch)):\n"
                "        return None\n",
            ),
        ),
        STORIES,
    ),
    Bug(
        "compare-and-swap is dropped",
        "pitfalls 37 and 38: a coordinator that has stood still writes over what others have decided",
        (
            Edit(
                FLUSH,
                "WHERE t.xid = s.xid AND t.version = s.version - 1",
                "WHERE t.xid = s.xid",
            ),
        ),
        STORE,
    ),
    Bug(
        "a claim changes the version of a row that is driven",
        "case 13: hmily#109 (the scan wins against the driver); rule A5",
        (
            Edit(
                POSTGRES,
                "SET wake_ms = {_NOW_MS} + %s, {_COUNTED} FROM due",
                "SET wake_ms = {_NOW_MS} + %s, version = t.version + 1, {_COUNTED} FROM due",
            ),
        ),
        STORE,
    ),
    Bug(
        "a claim does not look whether a row's time has come",
        "case 13: dbos-transact-java#491; rule A5 (the lease is ignored)",
        (
            Edit(
                POSTGRES,
                '_DUE = f"wake_ms <= {_NOW_MS} AND {_READABLE}"',
                '_DUE = f"wake_ms IS NOT NULL AND {_READABLE}"',
            ),
        ),
        STORE,
    ),
)
