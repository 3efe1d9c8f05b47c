"""The history checker: reads what was written down about transactions, and judges it by the invariants.

    events      the kinds of event that a history holds, and their lines                  standard library only
    reading     lines of JSON into events, with an exact error for what is none of them        "
    invariants  the invariants, by number and in words; violations and counts                  "
    evidence    all that a history says about one transaction, in order                        "
    decisions   what is judged about a transaction's decision and its end                      "
    branches    what is judged about the effects at participants                               "
    answers     what is judged about what initiators were told                                 "
    balances    what is judged about sums                                                      "
    judge       takes the events one by one, and gives the verdict                             "

It shares no code with what it judges: no module here imports another part of the coordinator, so that an error there
cannot hide itself. docs/histories.md has the format.
"""
