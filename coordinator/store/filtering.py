"""Lists of transactions: a filter as a condition in SQL, and a page of those that match.

What only a row's body tells (its actions) counts as true here, whether it is negated or not: the condition then lets
through all that the filter matches, and more, and ``filters_tree.matches`` looks at each.

No plan rests on what the database believes of its tables: statistics lag, and plans made for small tables are kept.
Where a label must be there, its index leads to the rows, the rarest label's if there are several; whatever else is
asked of labels is looked up by their key, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import sqlalchemy as sa

from ..filters_tree import COMPARE, And, Field, Node, Not, Or, Term
from ..model import State
from .rows import ListFilter
from .schema import ROW, labels, transactions

Found = Sequence[sa.Row[tuple[object, ...]]]
Query = sa.Select[tuple[object, ...]]
Condition = sa.ColumnElement[bool]

_COUNTED_MAX = 1_000
"""How many rows of a label are counted to tell which of several is the rarest."""

_t = transactions.c
_BY_INDEX = "SELECT " + ", ".join(
    f"set_config('{setting}', 'off', true)" for setting in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin")
)
_NEGATED = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def list_rows(connection: sa.Connection, which: ListFilter) -> Found:
    """The rows of a page, whole."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_BY_INDEX)
    return connection.execute(page(connection, which)).all()


def page(connection: sa.Connection, which: ListFilter) -> Query:
    """The query of a page: first which rows, then all of them, as whole rows are wide and would be sorted."""
    found = sa.select(_t.xid).where(_beyond(which, _t.xid)).order_by(_order(which)).limit(which.limit)
    if which.matching is not None:
        node = _without_not(which.matching, negated=False)
        needed = node.children if isinstance(node, And) else (node,)
        leading = _leading(connection, needed)
        if leading is not None:
            some = sa.select(labels.c.xid).where(_is_one_of(leading), _beyond(which, labels.c.xid))
            found = found.where(_t.xid.in_(some))
        found = found.where(*(_condition(child, which.now_ms) for child in needed if child is not leading))
    some_rows = found.subquery()
    return sa.select(*ROW).join(some_rows, _t.xid == some_rows.c.xid).order_by(_order(which))


def _beyond(which: ListFilter, xid: sa.ColumnElement[bytes]) -> Condition:
    if which.beyond_xid is None:
        return sa.true()
    return xid > which.beyond_xid if which.oldest_first else xid < which.beyond_xid


def _order(which: ListFilter) -> sa.ColumnElement[bytes]:
    return _t.xid.asc() if which.oldest_first else _t.xid.desc()


def _leading(connection: sa.Connection, needed: Sequence[Node]) -> Node | None:
    """Of what must all be so, the label, or choice of labels, that the fewest rows have; None if there is none.

    A choice that many have leads nowhere: they would all be sorted, and any way through the rows meets them soon.
    """
    ways = [node for node in needed if _is_about_labels(node)]
    if len(ways) <= 1 and not any(isinstance(node, Or) for node in ways):
        return ways[0] if ways else None
    some = [sa.select(labels.c.xid).where(_is_one_of(node)).limit(_COUNTED_MAX).subquery() for node in ways]
    counted = [sa.select(sa.func.count()).select_from(each).scalar_subquery() for each in some]
    counts = connection.execute(sa.select(*counted)).one()
    fewest, best = min(zip(counts, ways, strict=True), key=lambda way: (way[0], isinstance(way[1], Or)))
    return None if isinstance(best, Or) and fewest == _COUNTED_MAX else best


def _is_about_labels(node: Node) -> bool:
    """Whether it matches by a label, and by nothing else."""
    if isinstance(node, Or):
        return all(isinstance(child, Term) and _is_about_labels(child) for child in node.children)
    return isinstance(node, Term) and node.field is Field.LABEL and node.operator == "="


def _is_one_of(node: Node) -> Condition:
    """The condition on labels of a node that is about nothing else."""
    children = node.children if isinstance(node, Or) else (node,)
    return sa.or_(*(_is_label(child) for child in children if isinstance(child, Term)))


def _without_not(node: Node, *, negated: bool) -> Node:
    """The same, with every NOT inside the operators."""
    match node:
        case Term():
            return node._replace(operator=_NEGATED[node.operator]) if negated else node
        case Not():
            return _without_not(node.child, negated=not negated)
        case And() | Or():
            children = tuple(_without_not(child, negated=negated) for child in node.children)
            return Or(children) if isinstance(node, Or) != negated else And(children)


def _condition(node: Node, now_ms: int) -> Condition:
    """Which rows may match, at that time; of a tree without NOT."""
    match node:
        case And():
            return sa.and_(*(_condition(child, now_ms) for child in node.children))
        case Or():
            states = [int(child.value) for child in node.children if _is_state(child)]
            others = [_condition(child, now_ms) for child in node.children if not _is_state(child)]
            return sa.or_(*others, _in_states(states)) if states else sa.or_(*others)
        case Term():
            return _in_states([int(node.value)]) if _is_state(node) else _term(node, now_ms)
        case Not():
            raise AssertionError("unreachable")


def _is_state(node: Node) -> TypeGuard[Term]:
    return isinstance(node, Term) and node.field is Field.STATE and node.operator == "="


def _in_states(states: Sequence[int]) -> Condition:
    """All of them in one condition, which the index of unfinished rows serves if they are unfinished."""
    some = _t.state.in_(states)
    return some if any(State(state).finished for state in states) else sa.and_(some, _t.wake_ms.is_not(None))


def _is_label(term: Term) -> Condition:
    return sa.and_(labels.c.name == term.label, labels.c.value == term.value)


def _term(term: Term, now_ms: int) -> Condition:
    column: sa.ColumnElement[int]
    compared, value = COMPARE[term.operator], int(term.value) if isinstance(term.value, int) else 0
    match term.field:
        case Field.ACTION:
            return sa.true()
        case Field.LABEL:
            # Not EXISTS: that may become a join of all with all.
            found = sa.select(labels.c.xid).where(labels.c.xid == _t.xid, _is_label(term)).scalar_subquery()
            return found.is_not(None) if term.operator == "=" else found.is_(None)
        case Field.PARTICIPANT:
            has_it = _t.participants.contains(f",{term.value},", autoescape=True)
            return has_it if term.operator == "=" else ~has_it
        case Field.STATE:
            column = _t.state
        case Field.ATTENTION:
            column = _t.attention
        case Field.CREATE_TIME:
            column = _t.created_ms
        case Field.AGE:  # the older, the less
            turned = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}[term.operator]
            column, value, compared = _t.created_ms, now_ms - value, COMPARE[turned]
    condition: Condition = compared(column, value)
    return condition
