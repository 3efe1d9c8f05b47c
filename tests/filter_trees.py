"""Trees of filters for property tests: made from few values, so that they meet the rows of a test."""

from hypothesis import strategies as st

from coordinator.filters_tree import And, Field, Node, Not, Or, Term
from coordinator.model import Attention, State

EQUAL = st.sampled_from(["=", "!="])
ORDERED = st.sampled_from(["<", "<=", ">", ">="])


def terms(
    *, names: st.SearchStrategy[str], values: st.SearchStrategy[str], labels: st.SearchStrategy[str], ages_s: int
) -> st.SearchStrategy[Term]:
    """Terms with these names of participants and actions, labels' values and names, and ages up to so many seconds."""
    bare = st.just("")
    ages = st.integers(0, ages_s).map(lambda age_s: age_s * 1000)
    return st.one_of(
        st.builds(Term, st.just(Field.STATE), EQUAL, st.sampled_from(State), bare),
        st.builds(Term, st.just(Field.ATTENTION), EQUAL, st.sampled_from(Attention), bare),
        st.builds(Term, st.sampled_from([Field.PARTICIPANT, Field.ACTION]), EQUAL, names, bare),
        st.builds(Term, st.just(Field.LABEL), EQUAL, values, labels),
        st.builds(Term, st.just(Field.AGE), ORDERED, ages, bare),
        st.builds(Term, st.just(Field.CREATE_TIME), ORDERED, ages, bare),
    )


def trees(leaves: st.SearchStrategy[Term]) -> st.SearchStrategy[Node]:
    """Trees of at most some twenty of these."""

    def grown(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        several = st.lists(nodes, min_size=2, max_size=4).map(tuple)
        return st.one_of(st.builds(Not, nodes), st.builds(And, several), st.builds(Or, several))

    return st.recursive(leaves, grown, max_leaves=15)
