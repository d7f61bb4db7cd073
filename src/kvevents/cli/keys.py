"""`kvevents keys`: create CURVE keys, and show the public keys in files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

import zmq

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console, Span
from kvevents.cli.output import add_output, write_record
from kvevents.errors import UsageError
from kvevents.package_metadata import VERSION
from kvevents.zeromq.keys import PUBLIC_SUFFIX, SECRET_SUFFIX, KeyPair, read_pair, read_public_keys, write_pair

DESCRIPTION: Final = (
    "Create a pair of CURVE keys: NAME.key has the public key, for the peers; NAME.key_secret has both keys and stays secret.\n"
    "The files are ZeroMQ certificates, which czmq and pyzmq can read. The public key is printed.\n"
    "Use them with --curve-key, --curve-server-key and --curve-allow of other commands."
)
EXAMPLES: Final = """\
  kvevents keys engine-0                             engine-0.key and engine-0.key_secret
  kvevents keys keys/router                          in the directory keys
  kvevents keys --show engine-0.key
"""


def run(args: Namespace) -> int:
    """Create a key pair, or print the public keys in a file."""
    (_create_keys if args.show is None else _show_keys)(args, Console())
    return ExitCode.OK


def _create_keys(args: Namespace, console: Console) -> None:
    base: Path = args.name
    if not base.name or base.name.endswith((PUBLIC_SUFFIX, SECRET_SUFFIX)):
        raise UsageError(f"invalid name {str(base)!r}: expected a name without {PUBLIC_SUFFIX} and {SECRET_SUFFIX}")
    if not zmq.has("curve"):
        raise UsageError("cannot create keys: libzmq was built without CURVE; install pyzmq from a wheel, which has CURVE")
    pair = KeyPair(*(key.decode() for key in zmq.curve_keypair()))
    public, secret = write_pair(base, pair, f"Made by kvevents {VERSION}.", replace=args.force)
    record = {"public_key": pair.public, "public_file": str(public), "secret_file": str(secret)}
    if write_record(record, args.output, console):
        return
    console.line(pair.public)
    console.note(f"{secret}: keep it where {base.name} runs, readable by its user only")
    console.note(f"{public}: give it to the peers that accept {base.name} or connect to it")


def _show_keys(args: Namespace, console: Console) -> None:
    path: Path = args.show
    has_secret = path.name.endswith(SECRET_SUFFIX)
    keys = [read_pair(path).public] if has_secret else read_public_keys(path)
    if write_record({"file": str(path), "public_keys": keys, "secret": has_secret}, args.output, console):
        return
    for key in keys:
        console.line(key)
    if has_secret:
        console.note(Span("the file has the secret key as well, which is not printed", "dim"))


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    modes = parser.add_mutually_exclusive_group(required=True)
    modes.add_argument("name", nargs="?", metavar="NAME", type=Path, help="name of the pair, with or without a directory")
    modes.add_argument("--show", type=Path, help="print the public keys of a file instead")
    parser.add_argument("-f", "--force", action="store_true", help="replace a pair; its peers need the new key then")
    add_output(parser, "one object, which does not contain the secret key")
