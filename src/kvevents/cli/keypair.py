"""`kvevents keys`: CURVE keys in files, and what is in such files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

import msgspec
import zmq

from kvevents.cli import options
from kvevents.cli.command import OK, Command
from kvevents.cli.console import Console, Span
from kvevents.errors import UsageError
from kvevents.security.keys import PUBLIC_SUFFIX, SECRET_SUFFIX, KeyPair, read_pair, read_public_keys, write_pair
from kvevents.version import version


class Made(msgspec.Struct, frozen=True):
    """What `-o json` prints of a pair that was made."""

    public_key: str
    public_file: str
    secret_file: str


class Shown(msgspec.Struct, frozen=True):
    """What `-o json` prints of a file."""

    file: str
    public_keys: list[str]
    secret: bool
    """Whether it holds a secret key too."""


def run(args: Namespace) -> int:
    """Make a pair, or show what is in a file."""
    console = Console()
    if args.show is not None:
        _show(args.show, console, json=args.output == "json")
    else:
        _make(args, console)
    return OK


def _make(args: Namespace, console: Console) -> None:
    base: Path = args.name
    if not base.name or base.name.endswith((PUBLIC_SUFFIX, SECRET_SUFFIX)):
        raise UsageError(f"{base} is no name; files are called NAME{PUBLIC_SUFFIX} and NAME{SECRET_SUFFIX}")
    if not zmq.has("curve"):
        raise UsageError("this libzmq was built without CURVE; use pyzmq's own wheels, which have it")
    pair = KeyPair(*(key.decode() for key in zmq.curve_keypair()))
    public, secret = write_pair(base, pair, f"Made by kvevents {version()}.", replace=args.force)
    if args.output == "json":
        console.data(msgspec.json.encode(Made(pair.public, str(public), str(secret))))
        return
    console.line(pair.public)
    console.note(f"{secret}: keep it, readable for nobody else, where {base.name} runs")
    console.note(f"{public}: give it to those who let {base.name} in, or who connect to it")


def _show(path: Path, console: Console, *, json: bool) -> None:
    secret = path.name.endswith(SECRET_SUFFIX)
    keys = [read_pair(path).public] if secret else read_public_keys(path)
    if json:
        console.data(msgspec.json.encode(Shown(str(path), keys, secret)))
        return
    for key in keys:
        console.line(key)
    if secret:
        console.note(Span("the secret key is in there as well, and is not shown", "dim"))


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "name", nargs="?", metavar="NAME", type=Path, help="whose keys; a path before it says into which folder they go"
    )
    what.add_argument("--show", metavar="FILE", type=Path, help="the public keys of a file instead")
    parser.add_argument(
        "-f", "--force", action="store_true", help="replace a pair that exists: who has its public key is locked out"
    )
    options.add_output(parser, "one JSON object, which does not contain the secret key")


COMMAND: Final = Command(
    "keys",
    "make CURVE keys, which encrypt events and say who may connect",
    "Make a pair of CURVE keys: NAME.key, the public one, to be given away, and NAME.key_secret with both, to be kept.\n"
    "They are ZeroMQ's certificates, as czmq and pyzmq write and read them. The public key is printed.\n"
    "`--curve-key`, `--curve-server-key` and `--curve-allow` of other commands name such files.",
    """\
  kvevents keys engine-0                             engine-0.key and engine-0.key_secret
  kvevents keys keys/router                          in the folder keys
  kvevents keys --show engine-0.key
""",
    add_arguments,
    run,
)
