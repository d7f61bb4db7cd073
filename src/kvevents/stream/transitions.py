"""The transition table of a stream: which action follows an input, and which state comes next.

Theory of operation
===================

A publisher numbers its batches from 0 in each incarnation. Live frames of one connection arrive in order, with holes. Replay
replies arrive in order too, with holes, from what the publisher still holds. Neither identifies an incarnation. So four
questions are separate, and one module answers each:

- **Order** (`sequencer`). One number may be delivered next. Batches that arrive early wait in a reorder buffer.
- **Identity** (`identity`). A number and its payload together identify an incarnation: a replay must repeat the fingerprint of
  the newest delivered batch. A different payload under a known number means another incarnation. After a reconnect, live
  frames stay in quarantine until replay has repeated the whole fingerprint chain.
- **Cross-check** (`identity`). Replay may answer for another publisher. The stream is EXACT only if each answer has also
  repeated a live batch of this connection whose number is not below anything that the answer brought, or if another answer
  has done so that began with the newest batch of the first. A live batch below what was replayed is compared with the digest
  of that number; without a digest, replay is asked for the number again. A difference is a conflict.
- **Completeness**. An end marker confirms nothing, since engines drop messages inside a reply. History is complete only when
  live frames reach it, or when an answer brings nothing new: an answer of one message cannot have lost any.

One replay request is open at a time (`replay_fetch`). It fills a gap, verifies the publisher after a reconnect, probes a quiet
stream, or compares a live batch. Batches that an answer brings early are dropped when the next answer begins: two answers may
come from two publishers.

A restored stream is one whose connection is gone. `Stream.restore` brings back its number, its fingerprints and its degraded
reasons; connecting is then a reconnect. All live frames are of the new connection: a number not above the last one is a
restart.

A publisher that compacts its history answers with a *snapshot*: a clear, and everything that was live, under the number of the
last batch that it replaces. So one number may have two payloads in one incarnation if the replayed payload begins with a
clear. Either of them is right; if an earlier batch is missing, only the snapshot is. An answer that begins with a snapshot
ends the wait for all earlier batches: the first message of an answer is never lost, so the publisher holds nothing before it.
Early batches with lower numbers are dropped then, since the snapshot contains them.

A publisher of kvevents says in heartbeats what it holds after that batch, how far it trusts that, in which incarnation it is,
and when the next heartbeat comes (`trust`). Only a consumer can say whether its own state is the same (`Stream.report`). A
matching digest ends the degraded reasons of earlier batches. If the digest or the incarnation differs, the stream starts
over: such a publisher answers a request from 0 with everything that it holds. A publisher inside the engine also attests what
the engine's own cache holds. If the consumer's state is not that, the stream starts over too; only an attestation that agrees,
a clear or another incarnation ends that degraded reason. After several restarts in a row without an agreement the stream stays
DEGRADED. Reports come while other inputs are processed, so `Stream.deliveries` starts over.

How the table works
===================

`Stream` classifies everything that happens as an `Input`. `TRANSITIONS[state][input]` says which state follows and which
action `Stream` then takes. Classification depends on data (numbers, payloads, counts), never on the state; the state decides
only here. An action may cause a further input: a new incarnation begins in STARTING, which the next input leaves at once. An
input that a state does not list cannot happen there; `Stream` raises `AssertionError` if it does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias


@enum.unique
class State(enum.Enum):
    """What a stream is doing. The value is the reason that an operator reads in its trust."""

    CONNECTING = "not connected yet"
    STARTING = "an incarnation begins"
    CATCHING_UP = "batches are missing; replay was asked for"
    VERIFYING = "reconnected; is the publisher still the same?"
    FOLLOWING = "live batches are delivered as they come"
    DISCONNECTED = "disconnected"
    RESTORED = "restored; not yet connected"

    __hash__ = object.__hash__


@enum.unique
class Input(enum.Enum):
    """What happened to a stream."""

    UP_VERIFIABLE = "connected; replay can verify the publisher"
    UP_UNIDENTIFIED = "connected; no fingerprint identifies the publisher"
    UP_WITHOUT_REPLAY = "connected; there is no replay"
    UP_UNIDENTIFIED_WITHOUT_REPLAY = "connected; there is neither a fingerprint nor replay"
    DOWN = "disconnected"
    INCARNATION_WITH_REPLAY = "an incarnation begins; replay can bring its history"
    INCARNATION_WITHOUT_REPLAY = "an incarnation begins; there is no replay"
    LIVE = "a live frame arrived"
    LIVE_REGRESSED = "the number of a quarantined live frame went back"
    LIVE_DELIVERED = "a live batch was delivered in its turn"
    GAP = "a number is missing; replay can bring it"
    GAP_WITHOUT_REPLAY = "a number is missing; there is no replay"
    STILL_MISSING = "the publisher is not verified, and a number is missing; replay can bring it"
    STILL_MISSING_WITHOUT_REPLAY = "the publisher is not verified, and a number is missing; there is no replay"
    NEW_INCARNATION = "the publisher restarted, or holds something else"
    UNCONFIRMABLE = "replay no longer holds what it has brought, so nothing can confirm that"
    UNCONFIRMABLE_AGAIN = "the same, after several resyncs in a row"
    CONFLICT = "replay contradicts the live stream"
    CONFLICT_AGAIN = "a distrusted replay endpoint contradicts the live stream again"
    VERIFIED = "replay has repeated all fingerprints"
    COMPARED = "replay has repeated the live batch"
    NOT_COMPARABLE = "replay has evicted or compacted the live batch"
    FINGERPRINT_EVICTED = "replay has evicted the fingerprint"
    NOTHING_HELD = "replay has never held a batch"
    NOTHING_HELD_OF_INCARNATION = "replay has never held a batch, also of this incarnation"
    REPLAY_AHEAD = "replay has brought a batch before its turn"
    REACHED_LIVE = "live and replayed batches meet; the answer is read on to confirm it"
    COMPLETE = "nothing is missing"
    FETCH_FAILED = "replay does not answer, or answers for another stream"

    __hash__ = object.__hash__


@enum.unique
class Action(enum.Enum):
    """What `Stream` does because of an input."""

    BEGIN_INCARNATION = "begin an incarnation, release the quarantine"
    FETCH_MISSING = "fetch what is missing"
    VERIFY = "fetch from the first fingerprint"
    FOLLOW_UNVERIFIED = "release the quarantine; degrade by IDENTITY if anything was delivered"
    CONTINUE_UNVERIFIED = "close the fetch, release the quarantine; degrade by IDENTITY"
    DISCONNECT = "close the fetch"
    SEQUENCE = "put the frame in order"
    QUARANTINE = "let the frame wait"
    DISCARD_QUARANTINE = "discard the quarantine; the frame is of a newer incarnation"
    RESTART_AND_SEQUENCE = "reset; the frame begins the new incarnation"
    COMPARE_SOON = "ask replay for the live batch, if due"
    SETTLE = "close the fetch if live frames reach what was replayed"
    GIVE_UP = "declare gaps"
    RESTART = "reset; begin an incarnation with what was in quarantine"
    RESTART_UNCONFIRMED = "count the resync; reset"
    RESTART_CONFLICTED = "count the conflict; reset"
    DISTRUST = "close the fetch; distrust replay again"
    RELEASE_QUARANTINE = "put the quarantined frames in order; the answer goes on"
    READ_HISTORY = "read on"
    FINISH_COMPARISON = "count a complete answer; close the fetch"
    SKIP_COMPARISON = "read on; compare later"
    ABANDON = "close the fetch; compare later"
    DEGRADE_IDENTITY = "close the fetch; degrade by IDENTITY"
    CONFIRM_ANSWER = "read the answer on, up to the live batch"
    CLOSE_FETCH = "close the fetch; ask replay for the live batch, if due"
    NOTHING = "wait"

    __hash__ = object.__hash__


class Transition(NamedTuple):
    """The state that follows an input, and the action to take in it."""

    state: State
    action: Action


_INCARNATION = (State.STARTING, Action.RESTART)

TRANSITIONS: Final[dict[State, dict[Input, Transition]]] = {
    state: {input_: Transition(*target) for input_, target in row.items()}
    for state, row in {
        State.CONNECTING: {
            Input.UP_UNIDENTIFIED: (State.STARTING, Action.BEGIN_INCARNATION),
            Input.UP_UNIDENTIFIED_WITHOUT_REPLAY: (State.STARTING, Action.BEGIN_INCARNATION),
            Input.LIVE: (State.CONNECTING, Action.QUARANTINE),
            Input.LIVE_REGRESSED: (State.CONNECTING, Action.DISCARD_QUARANTINE),
        },
        State.STARTING: {
            Input.INCARNATION_WITH_REPLAY: (State.CATCHING_UP, Action.FETCH_MISSING),
            Input.INCARNATION_WITHOUT_REPLAY: (State.FOLLOWING, Action.NOTHING),
        },
        State.CATCHING_UP: {
            Input.DOWN: (State.DISCONNECTED, Action.DISCONNECT),
            Input.LIVE: (State.CATCHING_UP, Action.SEQUENCE),
            Input.LIVE_DELIVERED: (State.CATCHING_UP, Action.SETTLE),
            Input.GAP: (State.CATCHING_UP, Action.NOTHING),
            Input.GAP_WITHOUT_REPLAY: (State.CATCHING_UP, Action.NOTHING),
            Input.STILL_MISSING: (State.CATCHING_UP, Action.FETCH_MISSING),
            Input.STILL_MISSING_WITHOUT_REPLAY: (State.FOLLOWING, Action.GIVE_UP),
            Input.NEW_INCARNATION: _INCARNATION,
            Input.UNCONFIRMABLE: (State.STARTING, Action.RESTART_UNCONFIRMED),
            Input.UNCONFIRMABLE_AGAIN: (State.CATCHING_UP, Action.ABANDON),
            Input.CONFLICT: (State.STARTING, Action.RESTART_CONFLICTED),
            Input.CONFLICT_AGAIN: (State.CATCHING_UP, Action.DISTRUST),
            Input.VERIFIED: (State.CATCHING_UP, Action.READ_HISTORY),
            Input.COMPARED: (State.FOLLOWING, Action.FINISH_COMPARISON),
            Input.NOT_COMPARABLE: (State.CATCHING_UP, Action.SKIP_COMPARISON),
            Input.FINGERPRINT_EVICTED: (State.CATCHING_UP, Action.ABANDON),
            Input.NOTHING_HELD: (State.CATCHING_UP, Action.DEGRADE_IDENTITY),
            Input.NOTHING_HELD_OF_INCARNATION: (State.CATCHING_UP, Action.DEGRADE_IDENTITY),
            Input.REPLAY_AHEAD: (State.CATCHING_UP, Action.NOTHING),
            Input.REACHED_LIVE: (State.FOLLOWING, Action.CONFIRM_ANSWER),
            Input.COMPLETE: (State.FOLLOWING, Action.CLOSE_FETCH),
            Input.FETCH_FAILED: (State.FOLLOWING, Action.GIVE_UP),
        },
        State.VERIFYING: {
            Input.DOWN: (State.DISCONNECTED, Action.DISCONNECT),
            Input.LIVE: (State.VERIFYING, Action.QUARANTINE),
            Input.LIVE_REGRESSED: (State.STARTING, Action.RESTART_AND_SEQUENCE),
            Input.NEW_INCARNATION: _INCARNATION,
            Input.UNCONFIRMABLE: _INCARNATION,
            Input.UNCONFIRMABLE_AGAIN: _INCARNATION,
            Input.CONFLICT: _INCARNATION,
            Input.CONFLICT_AGAIN: _INCARNATION,
            Input.FINGERPRINT_EVICTED: _INCARNATION,
            Input.NOT_COMPARABLE: _INCARNATION,
            Input.VERIFIED: (State.CATCHING_UP, Action.RELEASE_QUARANTINE),
            Input.COMPARED: (State.CATCHING_UP, Action.RELEASE_QUARANTINE),
            Input.NOTHING_HELD: (State.FOLLOWING, Action.CONTINUE_UNVERIFIED),
            Input.NOTHING_HELD_OF_INCARNATION: (State.FOLLOWING, Action.CONTINUE_UNVERIFIED),
            Input.FETCH_FAILED: (State.FOLLOWING, Action.CONTINUE_UNVERIFIED),
        },
        State.FOLLOWING: {
            Input.DOWN: (State.DISCONNECTED, Action.DISCONNECT),
            Input.LIVE: (State.FOLLOWING, Action.SEQUENCE),
            Input.LIVE_DELIVERED: (State.FOLLOWING, Action.COMPARE_SOON),
            Input.GAP: (State.CATCHING_UP, Action.FETCH_MISSING),
            Input.GAP_WITHOUT_REPLAY: (State.FOLLOWING, Action.GIVE_UP),
            Input.STILL_MISSING: (State.CATCHING_UP, Action.FETCH_MISSING),
            Input.STILL_MISSING_WITHOUT_REPLAY: (State.FOLLOWING, Action.GIVE_UP),
            Input.NEW_INCARNATION: _INCARNATION,
            Input.UNCONFIRMABLE: (State.STARTING, Action.RESTART_UNCONFIRMED),
            Input.UNCONFIRMABLE_AGAIN: (State.FOLLOWING, Action.ABANDON),
            Input.CONFLICT: (State.STARTING, Action.RESTART_CONFLICTED),
            Input.CONFLICT_AGAIN: (State.FOLLOWING, Action.DISTRUST),
            Input.VERIFIED: (State.FOLLOWING, Action.READ_HISTORY),
            Input.COMPARED: (State.FOLLOWING, Action.FINISH_COMPARISON),
            Input.NOT_COMPARABLE: (State.FOLLOWING, Action.SKIP_COMPARISON),
            Input.FINGERPRINT_EVICTED: (State.FOLLOWING, Action.ABANDON),
            Input.NOTHING_HELD: (State.FOLLOWING, Action.ABANDON),
            Input.NOTHING_HELD_OF_INCARNATION: (State.FOLLOWING, Action.DEGRADE_IDENTITY),
            Input.REPLAY_AHEAD: (State.CATCHING_UP, Action.NOTHING),
            Input.REACHED_LIVE: (State.FOLLOWING, Action.CONFIRM_ANSWER),
            Input.COMPLETE: (State.FOLLOWING, Action.CLOSE_FETCH),
            Input.FETCH_FAILED: (State.FOLLOWING, Action.GIVE_UP),
        },
        State.DISCONNECTED: {
            Input.UP_VERIFIABLE: (State.VERIFYING, Action.VERIFY),
            Input.UP_UNIDENTIFIED: _INCARNATION,
            Input.UP_WITHOUT_REPLAY: (State.FOLLOWING, Action.FOLLOW_UNVERIFIED),
            Input.UP_UNIDENTIFIED_WITHOUT_REPLAY: (State.FOLLOWING, Action.FOLLOW_UNVERIFIED),
            Input.LIVE: (State.DISCONNECTED, Action.QUARANTINE),
            Input.LIVE_REGRESSED: (State.DISCONNECTED, Action.DISCARD_QUARANTINE),
        },
        State.RESTORED: {
            Input.UP_VERIFIABLE: (State.VERIFYING, Action.VERIFY),
            Input.UP_UNIDENTIFIED: _INCARNATION,
            Input.UP_WITHOUT_REPLAY: (State.FOLLOWING, Action.FOLLOW_UNVERIFIED),
            Input.UP_UNIDENTIFIED_WITHOUT_REPLAY: _INCARNATION,
            Input.LIVE: (State.RESTORED, Action.QUARANTINE),
            Input.LIVE_REGRESSED: (State.RESTORED, Action.DISCARD_QUARANTINE),
        },
    }.items()
}
"""What follows each input in each state."""

Steps: TypeAlias = Mapping[State, Mapping[Input, tuple[State, Callable[..., None]]]]
"""The transition table with a method in place of each action."""


def bind_actions(methods: Mapping[Action, Callable[..., None]]) -> Steps:
    """Return the transition table with the method of each action."""
    return {
        state: {input_: (transition.state, methods[transition.action]) for input_, transition in row.items()}
        for state, row in TRANSITIONS.items()
    }
