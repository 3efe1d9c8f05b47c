"""A small world for ``drive``: one row, a clock in milliseconds, scripted participants, and nothing that waits.

Coordinators are the real ``drive`` over an ``Io`` that only ever pauses; the world wakes them when a reply, a COMMIT
or a moment has come. Everything happens in the order of a heap, so a story tells the same each time it is run.

Whatever the script says, ``Store`` and ``World.deliver`` hold every story to the promises: states move along
``TRANSITIONS`` only, calls come from a durable row only, and no transaction ever sends both Confirm and Cancel.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import NamedTuple

from coordinator.flow import MayWait, drive
from coordinator.machine import TRANSITIONS
from coordinator.model import Attention, Call, Outcome, Payload, Phase, Policy, Refusal, Reply, State, Transaction
from coordinator.orders import AddBranch, Cancel, Confirm, Denied, OperatorCancel, Order, Renew, Report, Resolve, Retry

SAVE_MS = 2
"""How long a save takes."""
SETTLE_MS = 200
"""How long after a lost COMMIT its statement is run again on a new connection."""


class Answer(NamedTuple):
    """What a participant makes of one call, and when."""

    outcome: Outcome = Outcome.DONE
    after_ms: int | None = 10
    """None: never."""
    fence_id: str | None = None
    """None: that of the branch's participant."""
    text: str = ""
    attention: bool = False
    result: str | None = None
    seen: tuple[int, ...] = ()
    """The branch_ids that it saw tried."""
    lost: bool = False
    """The participant does it, but its reply never arrives."""


class BrokenPromise(AssertionError):
    """The core did what it must never do."""


class Pause:
    """Awaited by a coordinator until the world wakes it; it may be woken for nothing."""

    def __await__(self) -> Generator[Pause, None, None]:
        yield self


class Store:
    """One row with compare-and-swap on its version. A claim moves ``wake_ms`` and nothing else."""

    def __init__(self) -> None:
        self.row: Transaction | None = None
        self.durable: set[tuple[int, int]] = set()

    def standing(self) -> Transaction:
        assert self.row is not None, "the story has no transaction yet"
        return self.row

    def insert(self, tx: Transaction) -> None:
        self.row = tx
        self.durable = {(tx.version, tx.save_id)}

    def swap(self, tx: Transaction) -> Transaction:
        """The row that stands after this save; run again, it finds its own row and changes nothing."""
        row = self.standing()
        if row.save_id == tx.save_id or row.version != tx.version - 1:
            return row
        if tx.state is not row.state and tx.state not in _after(row.state, moves=1 if row.steps else 2):
            raise BrokenPromise(f"a save would turn {row.state.name} into {tx.state.name}")
        self.row = tx
        self.durable.add((tx.version, tx.save_id))
        return tx

    def claim(self, now_ms: int, policy: Policy) -> Transaction | None:
        row = self.standing()
        if row.wake_ms is None or row.wake_ms > now_ms:
            return None
        self.row = row._replace(wake_ms=now_ms + policy.lease_ms)
        return self.row


def _after(state: State, moves: int) -> set[State]:
    """What a state may turn into; one without branches is finished by the move that decides it."""
    found = {after for (before, _), after in TRANSITIONS.items() if before is state}
    return found if moves == 1 else found | {state for after in found for state in _after(after, moves - 1)}


class Coordinator:
    """One process: the ``Io`` of its ``drive``, and what the script does to it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.number = int(name[1:])
        self.scans = False
        self.stopped = False
        self.crash_at: tuple[str, State] | None = None
        self.next_commit = ""
        self.told: State | None = None
        self.running: Coroutine[Pause, None, Transaction] | None = None
        self._inbox: list[Reply] = []
        self._orders: list[Order] = []
        self._life = 0
        self._saves = 0
        self._crashes = 0

    def drive(self, tx: Transaction) -> None:
        self._inbox, self._orders = [], []
        self.running = drive(tx, self, self.world.policy)
        self.wake(self._life)

    def lives(self, life: int) -> bool:
        """Whether this is still the run that it was."""
        return life == self._life and self.running is not None

    def wake(self, life: int) -> None:
        """Step ``drive`` once, unless this is for an earlier run, or the process is stopped."""
        if self.running is None or life != self._life or self.stopped:
            return
        try:
            self.running.send(None)
        except StopIteration as end:
            self.running = None
            self._life += 1
            tx: Transaction = end.value
            self.log("ends" if tx.state.finished else f"rests until {tx.wake_ms}")

    def crash(self) -> None:
        self.log("CRASHES")
        self._life += 1
        self._crashes += 1
        self.running = None

    def go_on(self) -> None:
        self.stopped = False
        self.wake(self._life)

    def log(self, text: str) -> None:
        self.world.log(self.name, text)

    # --- Io --------------------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return self.world.now_ms

    def new_save_id(self) -> int:
        self._saves += 1
        return (self.number + 1) * 1000 + self._saves

    def send(self, tx: Transaction, calls: Sequence[Call]) -> None:
        for call in calls:
            self.world.deliver(self, tx, call)

    def expect(self, after_ms: int, reply: Reply) -> None:
        life = self._life

        def receive() -> None:
            self.log(f"reply {reply.branch + 1} {_reply(reply)}")
            self._inbox.append(reply)
            self.wake(life)

        self.world.at(self.world.now_ms + after_ms, receive, lambda: self.lives(life))

    def ask(self, order: Order) -> None:
        """An order reaches this coordinator: its driver, or one that comes for the order's sake."""
        self.log(f"is asked to {_order(order)}")
        self._orders.append(order)
        if self.running is None:
            self.running = drive(self.world.store.standing(), self, self.world.policy, owner=False)
        self.wake(self._life)

    def claimed(self) -> Transaction | None:
        return None  # a claim begins a run of its own here

    def asked(self) -> bool:
        return bool(self._orders)

    def answer(self, order: Order, tx: Transaction, denied: Denied | None) -> None:
        self.log(f"answers {_order(order)}: {tx.state.name if denied is None else f'{denied.reason}: {denied}'}")

    async def arrivals(self, until_ms: int | None, may_wait: MayWait) -> tuple[Sequence[Reply], Sequence[Order]]:
        life, waiting = self._life, [True]
        if until_ms is not None:
            self.world.at(until_ms, lambda: self.wake(life), lambda: self.lives(life) and bool(waiting))
        while not self._inbox and not self._orders and (until_ms is None or self.world.now_ms < until_ms):
            await Pause()
        waiting.clear()
        taken, self._inbox = self._inbox, []
        orders, self._orders = self._orders, []
        return taken, orders

    async def read(self) -> Transaction:
        return self.world.store.standing()

    async def save(self, tx: Transaction) -> Transaction:
        if self.crash_at == ("before", tx.state):
            await self._crashed()
        life = self._life
        fate, self.next_commit = self.next_commit, ""
        answers: list[Transaction] = []

        def write() -> None:
            self._write(tx)

        def write_and_answer() -> None:
            answers.append(self._write(tx))
            self.wake(life)

        now_ms = self.world.now_ms
        if fate:
            self.log(f"loses the COMMIT of v{tx.version}, {fate}")
            if fate == "applied":
                self.world.at(now_ms + SAVE_MS, write)
            self.world.at(now_ms + SETTLE_MS, write_and_answer, lambda: self.lives(life))
        elif tx.state.finished and self.world.store.standing().state is not State.TRYING and not tx.resolved:
            answers.append(tx)  # promises nothing new: it may be told before its COMMIT, which a crash may prevent
            crashes = self._crashes
            self.world.at(now_ms + SAVE_MS, write, lambda: crashes == self._crashes)
        else:
            self.world.at(now_ms + SAVE_MS, write_and_answer, lambda: self.lives(life))
        while not answers:
            await Pause()
        if self.crash_at == ("after", tx.state):
            await self._crashed()
        self._tell(answers[0])
        return answers[0]

    async def _crashed(self) -> None:
        self.crash_at = None
        self.world.graveyard.append(self.running)  # suspended for ever, as a killed process is
        self.crash()
        while True:
            await Pause()

    def _write(self, tx: Transaction) -> Transaction:
        before = self.world.store.standing()
        row = self.world.store.swap(tx)
        if row is before:
            mine = "its own row stands" if row.save_id == tx.save_id else f"{owner(row)}'s row stands: {row_text(row)}"
            self.log(f"save  v{tx.version} changes nothing, {mine}")
        else:
            self.log(f"save  {row_text(row)}")
            if row.attention is not before.attention:
                self.log(f"attention {row.attention.name}")
        return row

    def _tell(self, tx: Transaction) -> None:
        if tx.state is not self.told and tx.state is not State.TRYING:
            self.told = tx.state
            because = f": {tx.cancel_reason}" if tx.state is State.CANCELLING else ""
            self.log(f"may tell {tx.state.name}{because}")


class World:
    """The clock, the row, the participants' script, and the coordinators."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.now_ms = 0
        self.store = Store()
        self.lines: list[str] = []
        self.answers: dict[tuple[str, int, Phase], list[Answer]] = {}
        self.graveyard: list[object] = []
        self.adopted: list[str] = []
        """Claims of a transaction that somebody else was driving: only a stopped coordinator may lose one so."""
        self._coordinators: dict[str, Coordinator] = {}
        self._phase2: set[Phase] = set()
        self._heap: list[tuple[int, int, Callable[[], None], Callable[[], bool]]] = []
        self._seq = 0
        self._scan_ms = 0

    def coordinator(self, name: str) -> Coordinator:
        if name not in self._coordinators:
            self._coordinators[name] = Coordinator(self, name)
        return self._coordinators[name]

    def log(self, who: str, text: str) -> None:
        self.lines.append(f"{self.now_ms:>7} {who}  {text}")

    def at(self, when_ms: int, what: Callable[[], None], wanted: Callable[[], bool] = lambda: True) -> None:
        """Do something at that time, if it is still wanted then."""
        self._seq += 1
        heapq.heappush(self._heap, (when_ms, self._seq, what, wanted))

    def run(self, until_ms: int | None = None) -> None:
        """Let everything happen that is due by then; without an end, until nothing more will."""
        self._scan()
        while self._heap and (until_ms is None or self._heap[0][0] <= until_ms):
            when_ms, _, what, wanted = heapq.heappop(self._heap)
            if not wanted():
                continue
            self.now_ms = max(self.now_ms, when_ms)
            what()
            self._scan()
        if until_ms is not None:
            self.now_ms = max(self.now_ms, until_ms)

    def claim(self, coordinator: Coordinator) -> bool:
        tx = self.store.claim(self.now_ms, self.policy)
        if tx is None:
            return False
        coordinator.log(f"claims {row_text(tx)}")
        drivers = [c.name for c in self._coordinators.values() if c.running is not None and not c.stopped]
        self.adopted += [f"{coordinator.name} claims from {name} at {self.now_ms}" for name in drivers]
        self._coordinators[coordinator.name] = self._coordinators.pop(coordinator.name)  # the others come first now
        coordinator.drive(tx)
        return True

    def deliver(self, coordinator: Coordinator, tx: Transaction, call: Call) -> None:
        """A call leaves; what comes of it is in the script, and by its time-out at the latest it is UNKNOWN."""
        if (tx.version, tx.save_id) not in self.store.durable:
            raise BrokenPromise(f"a call leaves from v{tx.version}, which was never saved")
        if call.phase in (Phase.CONFIRM, Phase.CANCEL):
            self._phase2.add(call.phase)
        if len(self._phase2) > 1:
            raise BrokenPromise("Confirm and Cancel both left for one transaction")
        branch = tx.spec.branches[call.branch]
        coordinator.log(f"send  {call.branch + 1} {call.phase.name} #{call.attempt} to {branch.participant}")
        answer = self._answer(coordinator, call)
        late = answer.after_ms is None or answer.after_ms >= call.timeout_ms
        if answer.lost and answer.after_ms is not None:
            text = f"{call.branch + 1} {call.phase.name} is done at {branch.participant}, its reply is lost"
            self.at(self.now_ms + answer.after_ms, lambda: self.log("  ", text))
        if late or answer.lost:
            reply = Reply(call.branch, call.phase, Outcome.UNKNOWN, error=f"no answer in {call.timeout_ms} ms")
            coordinator.expect(call.timeout_ms, reply)
            return
        assert answer.after_ms is not None
        fence_id = f"db-{branch.participant}" if answer.fence_id is None else answer.fence_id
        coordinator.expect(answer.after_ms, _scripted(call, answer, fence_id))

    def _answer(self, coordinator: Coordinator, call: Call) -> Answer:
        """The next in the script for this coordinator, else for any; the last one is repeated."""
        for who in (coordinator.name, ""):
            queue = self.answers.get((who, call.branch, call.phase))
            if queue:
                return queue.pop(0) if len(queue) > 1 else queue[0]
        return Answer()

    def _scan(self) -> None:
        row = self.store.row
        for coordinator in [*self._coordinators.values()]:
            idle = coordinator.scans and coordinator.running is None and not coordinator.stopped
            if row is None or row.wake_ms is None or not idle:
                continue
            if row.wake_ms > self.now_ms:
                self._scan_at(row.wake_ms)
            elif self.claim(coordinator):
                return

    def _scan_at(self, wake_ms: int) -> None:
        if wake_ms != self._scan_ms:
            self._scan_ms = wake_ms
            self.at(wake_ms, lambda: None, lambda: self.store.standing().wake_ms == wake_ms)


def _scripted(call: Call, answer: Answer, fence_id: str) -> Reply:
    reply = Reply(call.branch, call.phase, answer.outcome, fence_id, attention=answer.attention)
    if answer.outcome is Outcome.REFUSED:
        return reply._replace(refusal=Refusal("no", answer.text) if answer.text else None)
    if answer.outcome is Outcome.DONE:
        result = None if answer.result is None else Payload(answer.result.encode())
        return reply._replace(result=result, seen=answer.seen)
    return reply._replace(error=answer.text)


def owner(tx: Transaction) -> str:
    """Whose save this row is."""
    return f"c{tx.save_id // 1000 - 1}"


def row_text(tx: Transaction) -> str:
    """A row on one line: version, state, how far each branch is, wake."""
    steps = []
    for number, step in enumerate(tx.steps, 1):
        text = f"{number}:{step.status.name.lower()}"
        if step.attempts:
            text += f"(failed {step.attempts}, next {step.next_ms})"
        steps.append(text)
    flagged = "" if tx.attention is Attention.NONE else f"  !{tx.attention.name}"
    if tx.mixed:
        flagged += "  MIXED"
    return f"v{tx.version} {tx.state.name}  {' '.join(steps)}  wake {tx.wake_ms}{flagged}"


def _order(order: Order) -> str:
    match order:
        case AddBranch(branch, joined):
            what = "enlist" if joined.enlisted else "try"
            below = f" below {joined.parent}" if joined.parent else ""
            return f"{what} {branch.participant}.{branch.action} as {joined.key}{below}"
        case Report(reply):
            seen = f", which saw {', '.join(map(str, reply.seen))}" if reply.seen else ""
            return f"note that {reply.branch + 1} {_reply(reply)}{seen}"
        case Confirm(tried):
            return f"confirm {', '.join(map(str, sorted(tried))) or 'nothing'}"
        case Cancel(reason):
            return f"cancel ({reason})" if reason else "cancel"
        case Renew(timeout_ms):
            return f"renew for {timeout_ms} ms"
        case OperatorCancel(actor, reason):
            return f"stop it for {actor} because {reason}"
        case Retry(participant):
            return f"retry {participant}".rstrip()
        case Resolve(branch_id, confirmed, actor):
            lost = ", being lost" if order.lost else ""
            return f"record for {actor} that {branch_id} was {'confirmed' if confirmed else 'cancelled'} by hand{lost}"
    raise AssertionError(f"no such order: {order}")


def _reply(reply: Reply) -> str:
    text = f"{reply.phase.name} {reply.outcome.name}"
    if reply.refusal is not None:
        text += f" ({reply.refusal.message})"
    return f"{text} ({reply.error})" if reply.error else text
