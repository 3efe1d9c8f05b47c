/*
 * The protocol of decision, delivery and fence, told from docs/protocol.md alone: sections A, C and E.
 *
 * One row with compare-and-swap (A1, A6), NC coordinators that may all drive at any time (A5), NB branches, each with a
 * fence in its participant's database (C), calls and replies that are repeated, overtaken and lost (E). Time is left
 * out: a deadline may have passed at any moment, and so may a lease.
 *
 * Faults are unlimited, but with -DLIVE=n: then there are at most n, no call is sent while it is out, and every run must
 * stop where the transaction has ended. -DKEEP has fewer states (see `take`), -DFORGETS one fault more.
 * -DBREAK_... breaks one rule, to see that it is found.
 */
#ifndef NB
#define NB 2 /* branches, at most 2 */
#endif
#ifndef NC
#define NC 2 /* coordinators, at most 2 */
#endif
#ifdef KEEP
#define MSGS 1
#endif
#ifndef MSGS
#define MSGS 2 /* messages of a kind in flight */
#endif

/* the record's states */
#define TRYING 1
#define CONFIRMING 2
#define CANCELLING 3
#define CONFIRMED 4
#define CANCELLED 5
/* a branch's states in the record */
#define PENDING 0
#define TRIED 1
#define REFUSED 2
#define ENDED 3
/* the fence row */
#define NO_ROW 0
#define F_TRIED 1
#define F_COMMITTED 2
#define F_ROLLBACKED 3
#define F_SUSPENDED 4
/* calls, then replies */
#define TRY 0
#define CONFIRM 1
#define CANCEL 2
#define TRY_DONE 3
#define TRY_REFUSED 4
#define CONFIRM_DONE 5
#define CANCEL_DONE 6
#define KINDS 7
#define NO_REPLY 7

typedef Record { byte state; byte branch[2]; byte version };
typedef Fence { byte row; byte tries; byte confirms; byte cancels };
typedef Lost { bool afloat; Record value };

Record row;       /* as it is durable */
Fence fence[2];  /* as they are committed, with the effects of the handlers */
byte flying[KINDS * 2];
Lost lost[2];    /* saves whose COMMIT was lost, on their way */
bool at_work[2];  /* whether a call of the branch is being carried out */
byte decision;    /* the first decision there ever was */
#ifdef FORGETS
bool forgot;      /* a participant's database was once set back */
#endif
#ifdef LIVE
byte faults = LIVE; /* that may still happen */
#define FAULT faults > 0
#define COUNT_FAULT faults--
#else
#define FAULT true
#define COUNT_FAULT skip
#endif

#define FLYING(kind, b) flying[(kind) * 2 + (b)]
#define DECIDED(s) (((s) == CONFIRMING || (s) == CONFIRMED) -> CONFIRMING : (((s) == TRYING) -> 0 : CANCELLING))
#define FINISHED(s) ((s) == CONFIRMED || (s) == CANCELLED)

inline copy(to, from, i) {
    to.state = from.state; to.version = from.version;
    i = 0;
    do
    :: i < NB -> to.branch[i] = from.branch[i]; i++
    :: else -> break
    od;
    i = 0
}

inline forget(r) {
    r.state = 0; r.version = 0; r.branch[0] = 0; r.branch[1] = 0
}

/* The row becomes `save`; what may never happen then is asserted here. */
inline write(save, i) {
#ifndef BREAK_CAS
    assert(save.version == row.version + 1);          /* a stale coordinator changes nothing */
#endif
    assert(decision == 0 || decision == DECIDED(save.state)); /* one decision, which never turns */
    assert(!FINISHED(row.state));                     /* forward only */
    copy(row, save, i);
    i = 0;
    do
    :: i < NC -> /* what can change nothing any more is left out */
        if
        :: lost[i].value.version <= row.version -> lost[i].afloat = false; forget(lost[i].value)
        :: else -> skip
        fi;
        i++
    :: else -> break
    od;
    decision = DECIDED(row.state);
    i = 0;
    do
    :: i < NB ->
        assert(row.state != CONFIRMED || fence[i].confirms == 1);
        assert(!FINISHED(row.state) || fence[i].row != F_TRIED); /* nothing is reserved at rest */
        i++
    :: else -> break
    od;
    i = 0
}

/* Save `mine` over `held`: answered, or lost with its COMMIT on the way. Over another's row it changes nothing, and
 * that row is taken. */
inline save_it(i) {
    mine.version = held.version + 1;
    if
#ifdef BREAK_CAS
    :: true -> write(mine, i); copy(held, row, i); forget(mine)
#else
    :: row.version == held.version -> write(mine, i); copy(held, row, i); forget(mine)
    :: row.version != held.version -> copy(held, row, i); forget(mine)
#endif
    :: row.version == held.version && FAULT && !lost[me].afloat ->
        COUNT_FAULT; waiting = true;
        lost[me].afloat = true; copy(lost[me].value, mine, i)
    fi
}

/* What the branches' progress makes of `mine`. */
inline settle(i, n, m) {
    n = 0; m = 0; i = 0;
    do
    :: i < NB ->
        if
        :: mine.branch[i] == TRIED -> n++
        :: mine.branch[i] == ENDED -> m++
        :: else -> skip
        fi;
        if
        :: mine.state == TRYING && mine.branch[i] == REFUSED -> mine.state = CANCELLING
        :: else -> skip
        fi;
        i++
    :: else -> break
    od;
    if
    :: mine.state == TRYING && n == NB -> mine.state = CONFIRMING
    :: mine.state == CONFIRMING && m == NB -> mine.state = CONFIRMED
    :: mine.state == CANCELLING && m == NB -> mine.state = CANCELLED
    :: else -> skip
    fi;
    i = 0; n = 0; m = 0
}

inline answered(kind, status, i, n, m) {
    copy(mine, held, i);
    mine.branch[b] = status;
    settle(i, n, m);
    if
    :: row.version != held.version && FLYING(kind, b) < MSGS -> FLYING(kind, b)++ /* to be applied to the row that is met */
    :: else -> skip
    fi;
    save_it(i)
}

/* A message has come; unless with -DLIVE it may come again. With -DKEEP it always may, and none is ever lost: fewer
 * states, and all runs, for what may come at any time need not come. */
inline take(kind) {
#ifdef KEEP
    skip
#else
    if
    :: FLYING(kind, b)--
#ifndef LIVE
    :: true -> skip
#endif
    fi
#endif
}

/* Whether a record owes a branch its call; and whether the call may leave (with -DLIVE: unless it is out already). */
#define OWES_TRY(r, b) (r.state == TRYING && r.branch[b] == PENDING)
#define OWES_CONFIRM(r, b) (r.state == CONFIRMING && r.branch[b] == TRIED)
#ifdef BREAK_REFUSED
#define OWES_CANCEL(r, b) (r.state == CANCELLING && r.branch[b] != ENDED && r.branch[b] != REFUSED)
#else
#define OWES_CANCEL(r, b) (r.state == CANCELLING && r.branch[b] != ENDED)
#endif
#ifdef LIVE
#define ROOM(call, done, b) (!FLYING(call, b) && !FLYING(done, b) && !at_work[b])
#define TRY_ROOM(b) (ROOM(TRY, TRY_DONE, b) && !FLYING(TRY_REFUSED, b))
#else
#define ROOM(call, done, b) (FLYING(call, b) < MSGS)
#define TRY_ROOM(b) (FLYING(TRY, b) < MSGS)
#endif
#define SENDS(r, b) (OWES_TRY(r, b) && TRY_ROOM(b) || OWES_CONFIRM(r, b) && ROOM(CONFIRM, CONFIRM_DONE, b) \
    || OWES_CANCEL(r, b) && ROOM(CANCEL, CANCEL_DONE, b))
#define EITHER(what) (what(0) || NB > 1 && what(1))
#define PICK(what) if :: what(0) -> b = 0 :: NB > 1 && what(1) -> b = 1 fi

/* What leaves from a record, which must be durable. */
inline send_from(r) {
    if
    :: OWES_TRY(r, b) -> FLYING(TRY, b)++
    :: OWES_CONFIRM(r, b) ->
        assert(DECIDED(row.state) == CONFIRMING); /* durable before it is sent */
        FLYING(CONFIRM, b)++
    :: OWES_CANCEL(r, b) ->
        assert(DECIDED(row.state) == CANCELLING);
        FLYING(CANCEL, b)++
    fi;
    b = 0
}

#define HELD_SENDS(b) SENDS(held, b)
#define MINE_SENDS(b) (mine.state != TRYING && SENDS(mine, b))
#define TRY_DONE_COMES(b) (FLYING(TRY_DONE, b) > 0)
#define TRY_REFUSED_COMES(b) (FLYING(TRY_REFUSED, b) > 0)
#define CONFIRM_DONE_COMES(b) (FLYING(CONFIRM_DONE, b) > 0)
#define CANCEL_DONE_COMES(b) (FLYING(CANCEL_DONE, b) > 0)
#define HOLDS (held.version != 0 && !waiting)

/* One process: it knows nothing, holds a record that a save or a claim has returned, or waits for a save. */
proctype Coordinator(byte me) {
    Record held; /* version 0: nothing */
    Record mine; /* what is being saved */
    bool waiting; /* for a COMMIT of unknown outcome */
    byte b; byte i; byte n; byte m;
    do
    :: d_step { !waiting && held.version != row.version && !FINISHED(row.state) -> copy(held, row, i) } /* claim */
    :: atomic { HOLDS && EITHER(HELD_SENDS) -> PICK(HELD_SENDS); send_from(held) }
#ifdef BREAK_SENT
    :: atomic { waiting && EITHER(MINE_SENDS) -> PICK(MINE_SENDS); send_from(mine) }
#endif
#ifdef BREAK_PRESUMED
    :: atomic { HOLDS && (held.state == TRYING || held.state == CONFIRMING) ->
#else
    :: atomic { HOLDS && held.state == TRYING -> /* the deadline has passed: of what is undecided only */
#endif
        copy(mine, held, i); mine.state = CANCELLING; save_it(i) }
    /* replies: only what is still wanted counts */
    :: atomic { HOLDS && EITHER(TRY_DONE_COMES) -> PICK(TRY_DONE_COMES); take(TRY_DONE);
        if
        :: OWES_TRY(held, b) -> answered(TRY_DONE, TRIED, i, n, m)
        :: else -> skip
        fi;
        b = 0 }
    :: atomic { HOLDS && EITHER(TRY_REFUSED_COMES) -> PICK(TRY_REFUSED_COMES); take(TRY_REFUSED);
        if
        :: OWES_TRY(held, b) -> answered(TRY_REFUSED, REFUSED, i, n, m)
        :: else -> skip
        fi;
        b = 0 }
    :: atomic { HOLDS && EITHER(CONFIRM_DONE_COMES) -> PICK(CONFIRM_DONE_COMES); take(CONFIRM_DONE);
        if
        :: OWES_CONFIRM(held, b) -> answered(CONFIRM_DONE, ENDED, i, n, m)
        :: else -> assert(DECIDED(held.state) != CANCELLING)
        fi;
        b = 0 }
    :: atomic { HOLDS && EITHER(CANCEL_DONE_COMES) -> PICK(CANCEL_DONE_COMES); take(CANCEL_DONE);
        if
        :: OWES_CANCEL(held, b) -> answered(CANCEL_DONE, ENDED, i, n, m)
        :: else -> assert(DECIDED(held.state) != CONFIRMING)
        fi;
        b = 0 }
    /* the same statement again; whatever row then stands is taken (mine or another's: its save_id tells) */
    :: d_step { waiting ->
        if
        :: row.version == held.version -> write(mine, i)
        :: else -> skip
        fi;
#ifdef BREAK_READ_BACK
        if
        :: row.version == mine.version -> copy(held, mine, i)
        :: else -> copy(held, row, i)
        fi;
#else
        copy(held, row, i);
#endif
        forget(mine); waiting = false }
    :: d_step { FAULT && (held.version != 0 || waiting) -> /* crash */
        COUNT_FAULT;
        forget(held); forget(mine); waiting = false }
    :: FINISHED(row.state) && !waiting -> break
    od
}

/* The store's end of a coordinator's lost COMMIT. */
proctype Store(byte c) {
    byte i;
end:
    do
    :: atomic { lost[c].afloat ->
        if
        :: row.version + 1 == lost[c].value.version -> write(lost[c].value, i)
        :: true -> lost[c].afloat = false; forget(lost[c].value) /* it has come to nothing */
        fi }
    od
}

inline begin_call() {
    open = true; at_work[b] = true; after.row = fence[b].row; after.tries = fence[b].tries;
    after.confirms = fence[b].confirms; after.cancels = fence[b].cancels
}

inline close() {
    open = false; at_work[b] = false; unheard = false; after.row = 0; after.tries = 0; after.confirms = 0; after.cancels = 0; reply = 0
}

/* What a local transaction leaves is committed. */
inline land() {
    assert(after.tries <= 1 && after.confirms <= 1 && after.cancels <= 1);
    assert(after.tries == fence[b].tries || fence[b].row == NO_ROW);     /* no Try after the cancel mark, nor twice */
    assert(after.confirms == 0 || (after.tries == 1 && decision == CONFIRMING));
    assert(after.cancels == 0 || decision == CANCELLING);
    fence[b].row = after.row; fence[b].tries = after.tries;
    fence[b].confirms = after.confirms; fence[b].cancels = after.cancels
}

inline answer() {
    land();
    if
    :: reply != NO_REPLY && FLYING(reply, b) < MSGS -> FLYING(reply, b)++
    :: else -> skip
    fi;
    close()
}

/* With -DKEEP the steps of a local transaction are one: the row is locked between them, and its reply need not come. */
inline at_once() {
#ifdef KEEP
    answer()
#else
    skip
#endif
}

inline contradiction() {
#ifdef FORGETS
    reply = NO_REPLY /* told as a violation, which moves nothing: a person is wanted */
#else
    assert(false)
#endif
}

/*
 * One participant's database. A call meets the fence row of its branch, its handler runs, and COMMIT is answered; or
 * nobody hears the answer, and it lands later, or never. The row is locked meanwhile, so calls come one at a time.
 */
proctype Participant(byte b) {
    Fence after;
    byte reply;
    bool open; bool unheard;
end:
    do
    :: atomic { !open && FLYING(TRY, b) > 0 ->
        take(TRY); begin_call();
        if
        :: fence[b].row == NO_ROW -> after.tries++; after.row = F_TRIED; reply = TRY_DONE
        :: fence[b].row == NO_ROW -> after.row = F_ROLLBACKED; reply = TRY_REFUSED /* the business says no */
#ifdef BREAK_LATE_TRY
        :: fence[b].row == F_SUSPENDED -> after.tries++; after.row = F_TRIED; reply = TRY_DONE
#else
        :: fence[b].row == F_SUSPENDED -> reply = TRY_REFUSED
#endif
        :: fence[b].row == F_TRIED || fence[b].row == F_COMMITTED -> reply = TRY_DONE
        :: fence[b].row == F_ROLLBACKED -> reply = TRY_REFUSED
        fi;
        at_once() }
    :: atomic { !open && FLYING(CONFIRM, b) > 0 ->
        take(CONFIRM); begin_call();
        if
        :: fence[b].row == F_TRIED -> after.confirms++; after.row = F_COMMITTED; reply = CONFIRM_DONE
        :: fence[b].row == F_COMMITTED -> reply = CONFIRM_DONE
#ifdef BREAK_EMPTY_CONFIRM
        :: fence[b].row == NO_ROW -> reply = CONFIRM_DONE
#else
        :: fence[b].row == NO_ROW -> contradiction()
#endif
        :: fence[b].row == F_ROLLBACKED || fence[b].row == F_SUSPENDED -> contradiction()
        fi;
        at_once() }
    :: atomic { !open && FLYING(CANCEL, b) > 0 ->
        take(CANCEL); begin_call();
        if
        :: fence[b].row == F_TRIED -> after.cancels++; after.row = F_ROLLBACKED; reply = CANCEL_DONE
        :: fence[b].row == NO_ROW -> after.row = F_SUSPENDED; reply = CANCEL_DONE
        :: fence[b].row == F_ROLLBACKED || fence[b].row == F_SUSPENDED -> reply = CANCEL_DONE
        :: fence[b].row == F_COMMITTED -> contradiction()
        fi;
        at_once() }
#ifndef KEEP
    :: atomic { open && !unheard ->
        if
        :: true -> answer()
        :: FAULT -> COUNT_FAULT; unheard = true /* the process has died, or its connection is lost in COMMIT */
        fi }
    :: atomic { open && unheard ->
        if
        :: true -> land()
        :: true -> skip
        fi;
        close() }
#endif
#ifdef FORGETS
    :: d_step { !forgot && !open && fence[b].row == F_TRIED ->
        forgot = true; fence[b].row = NO_ROW; fence[b].tries = 0 } /* set back to before its Try */
#endif
    od
}

/* What the network holds for a branch, or from it, may be lost; that it may come again is told where it is taken. */
proctype Network(byte b) {
end:
    do
    :: d_step { FAULT && FLYING(TRY, b) > 0 -> COUNT_FAULT; FLYING(TRY, b)-- }
    :: d_step { FAULT && FLYING(CONFIRM, b) > 0 -> COUNT_FAULT; FLYING(CONFIRM, b)-- }
    :: d_step { FAULT && FLYING(CANCEL, b) > 0 -> COUNT_FAULT; FLYING(CANCEL, b)-- }
    :: d_step { FAULT && FLYING(TRY_DONE, b) > 0 -> COUNT_FAULT; FLYING(TRY_DONE, b)-- }
    :: d_step { FAULT && FLYING(TRY_REFUSED, b) > 0 -> COUNT_FAULT; FLYING(TRY_REFUSED, b)-- }
    :: d_step { FAULT && FLYING(CONFIRM_DONE, b) > 0 -> COUNT_FAULT; FLYING(CONFIRM_DONE, b)-- }
    :: d_step { FAULT && FLYING(CANCEL_DONE, b) > 0 -> COUNT_FAULT; FLYING(CANCEL_DONE, b)-- }
    od
}

init {
    byte n;
    atomic {
        row.state = TRYING; row.version = 1;
        do
        :: n < NC -> run Coordinator(n); run Store(n); n++
        :: else -> break
        od;
        n = 0;
        do
        :: n < NB -> run Participant(n);
#ifndef KEEP
            run Network(n);
#endif
            n++
        :: else -> break
        od;
        n = 0
    }
}
