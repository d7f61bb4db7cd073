"""CURVE key pairs, and files with them."""

from __future__ import annotations

from pathlib import Path

import zmq

from kvevents.zeromq.keys import KeyPair, write_pair


def make_pair() -> KeyPair:
    return KeyPair(*(key.decode() for key in zmq.curve_keypair()))


def write_new_pair(folder: Path, name: str) -> KeyPair:
    pair = make_pair()
    write_pair(folder / name, pair, "A test's.", replace=True)
    return pair
