"""All that can happen next: one row, one or two coordinators, messages in flight, a database per participant.

A message in flight may be delivered any number of times, or never, until the network loses all that it holds: so a
bag with repeats is a set here, and losing some of it is never delivering them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from coordinator.model import Attention, Phase
from coordinator.model import State as TxState
from participant_sdk.fence import Status
from tests.model.fences import Branch, deliver, fence_phase, go_on
from tests.model.state import (
    DOWN,
    HOLDS,
    OUTCOMES,
    PHASES,
    SAVES,
    Coordinator,
    Label,
    Setup,
    State,
    call_bit,
    reply_bit,
    reply_bits,
    reply_kinds,
)
from tests.model.store import Age, Saved, numbered
from tests.model.values import LATE, NOTHING, Event, Rules, Values, reply_event

AGAIN = "runs its statement again"

Step = tuple[Label, State]


class World:
    """The transitions of one setup."""

    def __init__(self, setup: Setup, rules: Rules) -> None:
        self.setup = setup
        self.values = Values(rules)
        self._rules = rules
        self._coordinators: list[Coordinator] = []
        self._coordinator_numbers: dict[Coordinator, int] = {}
        self._branches: list[Branch] = []
        self._branch_numbers: dict[Branch, int] = {}
        self._aged: dict[int, int] = {}
        self._saved: dict[tuple[int, int, Age], Saved] = {}
        self._events: dict[int, tuple[Event, ...]] = {}
        self._delivered: dict[tuple[int, Phase], tuple[tuple[str, int, int], ...]] = {}
        self._went_on: dict[int, tuple[tuple[str, int, int], ...]] = {}
        self._due: dict[int, int] = {}
        self.down = self.coordinator_number(Coordinator())

    def first(self) -> State:
        """One coordinator begins the transaction; nothing is stored yet."""
        begun = self.values.begin(self.setup.spec)
        begins = self.coordinator_number(Coordinator(SAVES, begun))
        others = (self.down,) * (self.setup.coordinators - 1)
        return State(NOTHING, (*others, begins), branches=(self.branch_number(Branch()),) * self.setup.branches)

    def coordinator_number(self, coordinator: Coordinator) -> int:
        """The number of what a coordinator knows."""
        number = self._coordinator_numbers.get(coordinator)
        if number is None:
            number = self._coordinator_numbers[coordinator] = len(self._coordinators)
            self._coordinators.append(coordinator)
        return number

    def branch_number(self, branch: Branch) -> int:
        """The number of what a participant's database holds."""
        number = self._branch_numbers.get(branch)
        if number is None:
            number = self._branch_numbers[branch] = len(self._branches)
            self._branches.append(branch)
        return number

    def coordinator(self, number: int) -> Coordinator:
        """What a number stands for."""
        return self._coordinators[number]

    def branch(self, number: int) -> Branch:
        """What a number stands for."""
        return self._branches[number]

    def steps(self, state: State) -> Iterator[Step]:
        """Everything that can happen next."""
        for place, number in enumerate(state.coordinators):
            coordinator = self._coordinators[number]
            if coordinator.kind == HOLDS:
                yield from self._holder_steps(state, place, coordinator)
            elif coordinator.kind == SAVES:
                yield from self._saver_steps(state, place, coordinator)
            if coordinator.kind != DOWN:
                orphans = state.orphans
                if coordinator.afloat:
                    orphans = tuple(sorted({*orphans, coordinator.value}))
                yield Label(place, "crashes"), self._put(state, place, Coordinator())._replace(orphans=orphans)
            if state.row != NOTHING and coordinator.kind != SAVES and not self._holds_row(coordinator):
                tx_state = self.values.state(state.row)
                if tx_state is not None and not tx_state.finished:
                    yield Label(place, "claims the row"), self._put(state, place, Coordinator(HOLDS, state.row))
        for value in state.orphans:
            rest = tuple(v for v in state.orphans if v != value)
            yield Label(None, "a lost COMMIT comes to nothing", value), state._replace(orphans=rest)
            if self._saves(state.row, value, Age.FRESH).changed:
                yield Label(None, "a lost COMMIT lands", value), self._row_changes(state, value)
        yield from self._branch_steps(state)
        if (state.calls or state.replies) and all(number == self.down for number in state.coordinators):
            yield Label(None, "the network loses all that it holds"), state._replace(calls=0, replies=0)

    def _holds_row(self, coordinator: Coordinator) -> bool:
        return coordinator.kind == HOLDS and coordinator.age is Age.FRESH

    # --- coordinators ----------------------------------------------------------------------------------------------

    def _holder_steps(self, state: State, place: int, holder: Coordinator) -> Iterator[Step]:
        yield from self._send(state, place, holder)
        for event in self._met(state, holder.value):
            after = self.values.after(holder.value, event)
            if after != holder.value:
                yield from self._save(state, place, after, holder.age, event.name, event)
        if state.row != NOTHING and len(state.coordinators) + len(state.orphans) > 1:
            yield from self._save(state, place, holder.value, holder.age, "renews its lease or notes an attempt")

    def _send(self, state: State, place: int, sender: Coordinator) -> Iterator[Step]:
        due = self._due.get(sender.value)
        if due is None:
            bits = [call_bit(branch, phase) for branch, phase in self.values.calls(sender.value)]
            due = self._due[sender.value] = sum(bits)
        if due & ~state.calls:
            yield Label(place, "sends what is due"), state._replace(calls=state.calls | due)

    def _met(self, state: State, held: int) -> Iterator[Event]:
        yield LATE
        heard = self._events.get(state.replies)
        if heard is None:
            single = [kind for kind in reply_kinds(self.setup.branches) if state.replies & reply_bit(*kind)]
            sets = [(kind,) for kind in single] + (list(combinations(single, 2)) if self.setup.together else [])
            heard = self._events[state.replies] = tuple(reply_event(kinds) for kinds in sets)
        tx = self.values.tx(held)
        for event in heard:
            if all(reply.branch < len(tx.steps) for reply in event.replies):
                yield event
        if len(tx.resolved) < self.setup.resolved_max or not self.setup.resolved_max:
            yield from self.setup.events

    def _saver_steps(self, state: State, place: int, saver: Coordinator) -> Iterator[Step]:
        if self._rules.unsaved_decision_is_sent and self.values.state(saver.value) is not TxState.TRYING:
            yield from self._send(state, place, saver)
        yield from self._save(state, place, saver.value, saver.age, AGAIN, afloat=saver.afloat)
        if saver.afloat:
            gone = saver._replace(afloat=False)
            yield Label(place, "its lost COMMIT comes to nothing"), self._put(state, place, gone)
            if self._saves(state.row, saver.value, saver.age).changed:
                landed = Coordinator(SAVES, saver.value, Age.MINE)
                yield (
                    Label(place, "its lost COMMIT lands"),
                    self._put(self._row_changes(state, saver.value), place, landed),
                )

    def _save(
        self, state: State, place: int, value: int, age: Age, why: str, event: Event | None = None, afloat: bool = False
    ) -> Iterator[Step]:
        """A save that is answered; and one whose COMMIT is lost, unless it could change nothing."""
        came = self._saves(state.row, value, age)
        after = self._row_changes(state, value) if came.changed else state
        stands = value if came.mine or (self._rules.read_back_by_version and why is AGAIN) else after.row
        holds = Coordinator(HOLDS, stands)
        if (tx_state := self.values.state(stands)) is not None and tx_state.finished:
            holds = Coordinator()  # there is nothing more to do
        verdict = (
            " and saves" if came.changed else " and finds that row saved" if came.mine else " and meets another row"
        )
        yield Label(place, why + verdict, value, age, event), self._put(after, place, holds)
        if came.changed and not afloat and self._afloat(state) < self.setup.lost:
            yield (
                Label(place, f"{why}, and its COMMIT is lost", value, age, event),
                self._put(state, place, Coordinator(SAVES, value, age, True)),
            )

    def _saves(self, row: int, value: int, age: Age) -> Saved:
        key = (row, value, age)
        found = self._saved.get(key)
        if found is None:
            before = None if row == NOTHING else self.values.tx(row)
            stands, save = numbered(before, self.values.tx(value), age)
            after = self._rules.swap(stands, save)
            found = self._saved[key] = Saved(after is save, after.save_id == save.save_id)
        return found

    def _afloat(self, state: State) -> int:
        return len(state.orphans) + sum(self._coordinators[number].afloat for number in state.coordinators)

    def _row_changes(self, state: State, value: int) -> State:
        """The world after a save of ``value``: whatever was made from the row before is stale."""
        return state._replace(row=value, coordinators=tuple(map(self._age, state.coordinators)), orphans=())

    def _age(self, number: int) -> int:
        found = self._aged.get(number)
        if found is None:
            known = self._coordinators[number]
            aged = known if known.kind == DOWN else known._replace(age=Age.STALE, afloat=False)
            found = self._aged[number] = self.coordinator_number(aged)
        return found

    def _put(self, state: State, place: int, coordinator: Coordinator) -> State:
        known = list(state.coordinators)
        known[place] = self.coordinator_number(coordinator)
        return state._replace(coordinators=tuple(known))

    # --- participants ----------------------------------------------------------------------------------------------

    def _branch_steps(self, state: State) -> Iterator[Step]:
        for index, number in enumerate(state.branches):
            branch = self._branches[number]
            if branch.open is not None:
                moves, what = self._going_on(number), "local transaction"
                for move in moves:
                    yield Label(None, f"branch {index + 1}: {what} {move[0]}"), self._moved(state, index, move)
                continue
            for phase in Phase:
                if state.calls & call_bit(index, phase):
                    for move in self._meeting(number, phase):
                        label = Label(None, f"branch {index + 1}: {phase.name} arrives and {move[0]}")
                        yield label, self._moved(state, index, move)
            if self.setup.forgets and not state.forgot and branch.status is Status.TRIED:
                forgotten = self._moved(state, index, ("", self.branch_number(Branch()), 0))
                yield Label(None, f"branch {index + 1}: database is set back"), forgotten._replace(forgot=True)

    def _meeting(self, number: int, phase: Phase) -> tuple[tuple[str, int, int], ...]:
        found = self._delivered.get((number, phase))
        if found is None:
            branch = self._branches[number]
            verdict = self._rules.decide(fence_phase(phase), branch.status, True)
            moves = deliver(branch, phase, verdict, steps=self.setup.steps)
            found = self._delivered[number, phase] = tuple(
                (m.name, self.branch_number(m.after), reply_bits(m.phase, m.outcome)) for m in moves
            )
        return found

    def _going_on(self, number: int) -> tuple[tuple[str, int, int], ...]:
        found = self._went_on.get(number)
        if found is None:
            found = self._went_on[number] = tuple(
                (m.name, self.branch_number(m.after), reply_bits(m.phase, m.outcome))
                for m in go_on(self._branches[number])
            )
        return found

    def _moved(self, state: State, index: int, move: tuple[str, int, int]) -> State:
        branches = list(state.branches)
        branches[index] = move[1]
        return state._replace(branches=tuple(branches), replies=state.replies | move[2] << index * PHASES * OUTCOMES)

    def ended(self, state: State) -> bool:
        """Whether the transaction has come to an end, or is marked for a person, or was never stored."""
        if state.row == NOTHING:
            return not state.orphans and all(number == self.down for number in state.coordinators)
        tx = self.values.tx(state.row)
        return tx.state.finished or tx.attention is Attention.VIOLATION
