"""The transition table of a stream: which action follows an input, and which state comes next.

Theory of operation
===================

A publisher numbers its batches from 0 in each incarnation. Live frames of one connection arrive in order, but frames can be
missing. Replay replies contain the batches that the publisher still holds; they arrive in order, but replies can be missing.
Neither live frames nor replies identify an incarnation. So there are four separate questions:

- **Order** (`sequencer`). Only the batch with the next number is delivered. Batches that arrive early wait in a reorder buffer.
- **Identity** (`identity`). A number and its payload together identify an incarnation: a replay must repeat the fingerprint of
  the newest delivered batch. A different payload under a known number means another incarnation. After a reconnect, live
  frames stay in quarantine until replay has repeated the whole fingerprint chain.
- **Cross-check** (`identity`). The replay endpoint may belong to another publisher, so the stream is EXACT only if each answer
  is confirmed. An answer is confirmed if it repeats a live batch of this connection and has no newer batches, or if a later
  confirmed answer begins with the newest batch of this answer. A live batch that replay has already delivered is compared by
  its digest; without a stored digest, replay must send the batch again. A difference is a conflict.
- **Completeness**. An end marker confirms nothing, because engines drop messages inside a reply. History is complete only when
  live frames reach it, or when an answer brings no new batch: an answer of one message cannot have lost any message.

One replay request is open at a time (`replay_fetch`). The request fills a gap, verifies the publisher after a reconnect, probes
a quiet stream, or compares a live batch. Batches that an answer brings early are dropped when the next answer begins, because
two answers may come from two publishers.

A restored stream is like a disconnected stream: `Stream.restore` sets its number, its fingerprints and its degraded reasons,
and the first connection counts as a reconnect. All live frames belong to the new connection, so a number that is not above the
restored number shows a restart.

A publisher that compacts its history answers with a *snapshot*: a clear, and stores of all live blocks, under the number of the
last batch that it replaces. So one number can have two payloads in one incarnation if the replayed payload begins with a clear.
The original batch and the snapshot are both correct; if an earlier batch is missing, only the snapshot is correct. An answer
that begins with a snapshot ends the wait for all earlier batches: the first message of an answer is never lost, so the
publisher has no earlier batch. Early batches with lower numbers are then dropped, because the snapshot contains them.

A heartbeat of a kvevents publisher states the digest of its state after the batch, its trust in this state, its incarnation,
and when the next heartbeat comes (`trust`). Only a consumer can compare the digest with its own state (`Stream.report`). A
matching digest ends the degraded reasons of earlier batches. If the digest or the incarnation differs, the stream starts over,
because a publisher with heartbeats answers a request from 0 with its whole state. A publisher inside the engine also attests
the contents of the engine's own cache. If the consumer's state differs from the attestation, the stream also starts over; only
a matching attestation, a clear or another incarnation ends the degraded reason `UNATTESTED`. If several consecutive restarts
bring no match, the stream stays DEGRADED. A report can arrive while another input is processed, so the restart that it causes
waits for the next call of `Stream.deliveries`.

How the table works
===================

`Stream` classifies every event as an `Input`, and `AnswerReader` classifies the messages of replay. `TRANSITIONS[state][input]`
has the next state and the action that `Stream` then takes. Classification depends on data (numbers, payloads, counts), never on
the state, which matters only in this table. An action can cause a further input: if replay is not available, FETCH_MISSING
fails at once. An input that a state does not list cannot happen in that state; `Stream` raises `KeyError` for such an input.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


@enum.unique
class State(enum.Enum):
    """The state of a stream. The value is the reason that the stream's trust shows to operators."""

    CONNECTING = "not connected yet"
    CATCHING_UP = "batches are missing; replay was asked for"
    VERIFYING = "reconnected; is the publisher still the same?"
    FOLLOWING = "live batches are delivered as they come"
    DISCONNECTED = "disconnected"
    RESTORED = "restored; not yet connected"

    __hash__ = object.__hash__


@enum.unique
class Input(enum.Enum):
    """An event that changes the state of a stream."""

    UP_VERIFIABLE = "connected; replay can verify the publisher"
    UP_UNIDENTIFIED = "connected; no fingerprint identifies the publisher"
    UP_WITHOUT_REPLAY = "connected without replay; nothing was delivered yet, or a fingerprint identifies the publisher"
    DOWN = "disconnected"
    LIVE = "a live frame arrived"
    LIVE_REGRESSED = "the number of a quarantined live frame went back"
    LIVE_DELIVERED = "a live batch was delivered in its turn"
    GAP = "a number is missing"
    NEW_INCARNATION = "the publisher restarted, or holds something else"
    CONFLICT = "replay contradicts the live stream"
    VERIFIED = "replay has repeated all fingerprints from before the reconnect"
    EVICTED = "replay has evicted the fingerprint, and fetching everything again would not help"
    REPLAY_AHEAD = "replay has brought a batch before its turn"
    REACHED_LIVE = "live and replayed batches meet; the answer is read on to confirm it"
    COMPLETE = "nothing is missing"
    FETCH_FAILED = "replay does not answer, holds nothing, answers for another stream, or does not exist"

    __hash__ = object.__hash__


@enum.unique
class Action(enum.Enum):
    """The reaction of `Stream` to an input: the name of a method of `Stream`."""

    QUARANTINE_FRAME = "let the frame wait"
    DISCARD_QUARANTINE = "discard the quarantine; the frame is of a newer incarnation"
    RELEASE_QUARANTINE = "put the quarantined frames in order; the answer goes on"
    SEQUENCE = "put the frame in order"
    SETTLE = "close the fetch if live frames reach what was replayed"
    COMPARE_SOON = "ask replay for the live batch, if due"
    RESTART = "reset; fetch what is missing; begin the incarnation with what was in quarantine"
    RESTART_AND_SEQUENCE = "discard the quarantine; reset; the frame begins the new incarnation"
    RESTART_CONFLICTED = "count the conflict; reset"
    VERIFY = "fetch from the first fingerprint"
    FOLLOW_UNVERIFIED = "close the fetch, release the quarantine; degrade by IDENTITY if anything was delivered"
    FETCH_MISSING = "fetch what is missing"
    GIVE_UP = "close the fetch, declare gaps; compare later"
    CLOSE_FETCH = "close the fetch; ask replay for the live batch, if due"
    DISCONNECT = "close the fetch"
    NOTHING = "wait, or read on"

    __hash__ = object.__hash__


class Transition(NamedTuple):
    """The state that follows an input, and the action to take in that state."""

    state: State
    action: Action


_INCARNATION = (State.CATCHING_UP, Action.RESTART)

TRANSITIONS: Final[dict[State, dict[Input, Transition]]] = {
    state: {input_: Transition(*target) for input_, target in row.items()}
    for state, row in {
        State.CONNECTING: {
            Input.UP_UNIDENTIFIED: _INCARNATION,
            Input.UP_WITHOUT_REPLAY: _INCARNATION,
            Input.LIVE: (State.CONNECTING, Action.QUARANTINE_FRAME),
            Input.LIVE_REGRESSED: (State.CONNECTING, Action.DISCARD_QUARANTINE),
        },
        State.CATCHING_UP: {
            Input.DOWN: (State.DISCONNECTED, Action.DISCONNECT),
            Input.LIVE: (State.CATCHING_UP, Action.SEQUENCE),
            Input.LIVE_DELIVERED: (State.CATCHING_UP, Action.SETTLE),
            Input.GAP: (State.CATCHING_UP, Action.NOTHING),
            Input.NEW_INCARNATION: _INCARNATION,
            Input.CONFLICT: (State.CATCHING_UP, Action.RESTART_CONFLICTED),
            Input.EVICTED: (State.FOLLOWING, Action.GIVE_UP),
            Input.REPLAY_AHEAD: (State.CATCHING_UP, Action.NOTHING),
            Input.REACHED_LIVE: (State.FOLLOWING, Action.NOTHING),
            Input.COMPLETE: (State.FOLLOWING, Action.CLOSE_FETCH),
            Input.FETCH_FAILED: (State.FOLLOWING, Action.GIVE_UP),
        },
        State.VERIFYING: {
            Input.DOWN: (State.DISCONNECTED, Action.DISCONNECT),
            Input.LIVE: (State.VERIFYING, Action.QUARANTINE_FRAME),
            Input.LIVE_REGRESSED: (State.CATCHING_UP, Action.RESTART_AND_SEQUENCE),
            Input.NEW_INCARNATION: _INCARNATION,
            Input.EVICTED: _INCARNATION,
            Input.VERIFIED: (State.CATCHING_UP, Action.RELEASE_QUARANTINE),
            Input.FETCH_FAILED: (State.FOLLOWING, Action.FOLLOW_UNVERIFIED),
        },
        State.FOLLOWING: {
            Input.DOWN: (State.DISCONNECTED, Action.DISCONNECT),
            Input.LIVE: (State.FOLLOWING, Action.SEQUENCE),
            Input.LIVE_DELIVERED: (State.FOLLOWING, Action.COMPARE_SOON),
            Input.GAP: (State.CATCHING_UP, Action.FETCH_MISSING),
            Input.NEW_INCARNATION: _INCARNATION,
            Input.CONFLICT: (State.CATCHING_UP, Action.RESTART_CONFLICTED),
            Input.EVICTED: (State.FOLLOWING, Action.GIVE_UP),
            Input.REPLAY_AHEAD: (State.CATCHING_UP, Action.NOTHING),
            Input.REACHED_LIVE: (State.FOLLOWING, Action.NOTHING),
            Input.COMPLETE: (State.FOLLOWING, Action.CLOSE_FETCH),
            Input.FETCH_FAILED: (State.FOLLOWING, Action.GIVE_UP),
        },
        State.DISCONNECTED: {
            Input.UP_VERIFIABLE: (State.VERIFYING, Action.VERIFY),
            Input.UP_UNIDENTIFIED: _INCARNATION,
            Input.UP_WITHOUT_REPLAY: (State.FOLLOWING, Action.FOLLOW_UNVERIFIED),
            Input.LIVE: (State.DISCONNECTED, Action.QUARANTINE_FRAME),
            Input.LIVE_REGRESSED: (State.DISCONNECTED, Action.DISCARD_QUARANTINE),
        },
        State.RESTORED: {
            Input.UP_VERIFIABLE: (State.VERIFYING, Action.VERIFY),
            Input.UP_UNIDENTIFIED: _INCARNATION,
            Input.UP_WITHOUT_REPLAY: (State.FOLLOWING, Action.FOLLOW_UNVERIFIED),
            Input.LIVE: (State.RESTORED, Action.QUARANTINE_FRAME),
            Input.LIVE_REGRESSED: (State.RESTORED, Action.DISCARD_QUARANTINE),
        },
    }.items()
}
"""The next state and the action for each input in each state."""
