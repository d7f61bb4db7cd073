"""`serve --check` and `bridge --check` refuse what `serve` and `bridge` refuse, with the same message and exit code."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from certificate_cases import make_certificates
from cli_cases import Program, run
from kvevents.errors import ConfigError
from kvevents.service.settings import ServiceSettings
from kvevents.settings import convert
from service_cases import serving, write

ENGINE = 'model = "m"\nendpoint = "tcp://127.0.0.1:5557"\n'
COLLIDING = '[[dns]]\ntarget = "localhost:6557"\nreplay_endpoint = "tcp://*:6558"\nranks = 4\nmodel = "m"\n'
TWICE = f'[[sources]]\ninstance = "a"\n{ENGINE}[[sources]]\ninstance = "a"\nmodel = "m"\nendpoint = "tcp://127.0.0.1:5558"\n'


@pytest.fixture(scope="module", name="certificate")
def certificate_and_key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = make_certificates(tmp_path_factory.mktemp("tls"))
    return folder / "server.pem", folder / "server.key"


def make_config_without_key(home: Path, certificate: tuple[Path, Path]) -> str:
    return f'tls = {{ certificate = "{certificate[0]}", key = "{home}/none.key" }}'


def make_config_with_wrong_key(home: Path, certificate: tuple[Path, Path]) -> str:
    return f'tls = {{ certificate = "{certificate[0]}", key = "{write(home / "wrong.key", "no key")}" }}'


def make_config_without_ca(home: Path, certificate: tuple[Path, Path]) -> str:
    return f'tls = {{ certificate = "{certificate[0]}", key = "{certificate[1]}", client_ca = "{home}/none.pem" }}'


def make_token_config(setting: str) -> Callable[[Path, tuple[Path, Path]], str]:
    def write_config(home: Path, _certificate: tuple[Path, Path]) -> str:
        write(home / "short", "abc")
        return f'access = {{ tokens = [{{ role = "read", {setting.format(home=home)} }}] }}'

    return write_config


def make_config(text: str) -> Callable[[Path, tuple[Path, Path]], str]:
    def write_config(home: Path, _certificate: tuple[Path, Path]) -> str:
        write(home / "file", "not a folder")
        write(home / "wrong.toml", "[[sources]]\nendpoin = 1\n")
        write(home / "one.toml", f'[[sources]]\ninstance = "a"\n{ENGINE}')
        return text.format(home=home)

    return write_config


BAD = {
    "the certificate is missing": (
        make_config('tls = {{ certificate = "{home}/none", key = "{home}/none" }}'),
        "tls cannot be used",
    ),
    "the key is missing": (make_config_without_key, "none.key"),
    "the key does not fit": (make_config_with_wrong_key, "tls cannot be used"),
    "the authorities are missing": (make_config_without_ca, "none.pem"),
    "token_file is missing": (make_token_config('token_file = "{home}/none"'), "none"),
    "token_env is not set": (make_token_config('token_env = "KVEVENTS_NOT_SET"'), "KVEVENTS_NOT_SET"),
    "the token is short": (make_token_config('token_file = "{home}/short"'), "16"),
    "state_dir is in a file": (make_config('state_dir = "{home}/file/state"'), "state_dir"),
    "state_dir is a file": (make_config('state_dir = "{home}/file"'), "state_dir"),
    "state_dir cannot be created": (make_config('state_dir = "/proc/kvevents/state"'), "state_dir"),
    "a source file is missing": (make_config('source_files = ["{home}/none.toml"]'), "none.toml"),
    "a source file is wrong": (make_config('source_files = ["{home}/wrong.toml"]'), "endpoin"),
    "one engine has two endpoints": (make_config(TWICE), "named twice"),
    "one engine is in two files": (
        make_config(f'source_files = ["{{home}}/one.toml"]\n{TWICE[TWICE.rindex("[[") :]}'),
        "named twice",
    ),
    "ranks have different block sizes": (
        make_config(
            f'[[sources]]\ninstance = "a"\nblock_size = 16\n{ENGINE}'
            f'[[sources]]\ninstance = "a"\nrank = 1\nblock_size = 32\n{ENGINE}'
        ),
        "blocks of",
    ),
    "ports of ranks collide": (make_config(COLLIDING), "the event port 6560 of rank 3 is the replay port of rank 2"),
    "a DNS target has no port": (make_config('[[dns]]\ntarget = "engines"\nmodel = "m"\n'), "engines"),
    "an endpoint pattern is invalid": (make_config('allow = ["tcp://[::1"]'), "allow"),
    "a setting is misspelled": (make_config("snapshot_second = 1"), "did you mean 'snapshot_seconds'?"),
}


@pytest.mark.parametrize("case", BAD)
def test_check_refuses_what_serve_refuses(case: str, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    write_config, expected = BAD[case]
    path = write(tmp_path / "c.toml", write_config(tmp_path, certificate))
    checked = run("serve", "--config", path, "--port", 0, "--check")
    served = run("serve", "--config", path, "--port", 0)
    assert expected in checked.err, checked.err
    assert (checked.code, checked.err) == (served.code, served.err)
    assert checked.code == 2
    assert checked.err.count("\n") == 1, "one line"
    assert checked.err.startswith("kvevents: ")


@pytest.mark.parametrize("case", ["one engine has two endpoints", "ports of ranks collide", "a source file is missing"])
def test_check_refuses_what_bridge_refuses(case: str, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    write_config, expected = BAD[case]
    path = write(tmp_path / "c.toml", write_config(tmp_path, certificate))
    checked = run("bridge", "--nats", "nats://127.0.0.1:1", "--config", path, "--check")
    bridged = run("bridge", "--nats", "nats://127.0.0.1:1", "--config", path)
    assert expected in checked.err, checked.err
    assert (checked.code, checked.err) == (bridged.code, bridged.err)
    assert checked.code == 2


PLANE_COMMANDS: dict[str, tuple[object, ...]] = {
    "serve": ("serve", "--port", 0, "--nats"),
    "bridge": ("bridge", "--model", "m", "--worker", "a=tcp://10.0.0.7:5557", "--nats"),
}


@pytest.mark.parametrize("command", PLANE_COMMANDS)
@pytest.mark.parametrize("wrong", ["no certificate", "another key"])
def test_check_refuses_unusable_tls_files_of_a_plane(
    command: str, wrong: str, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    """Both commands fail before they begin. A replica would otherwise run without ever becoming ready."""
    text = write(tmp_path / "text", "no certificate")
    flags: tuple[object, ...] = ("--tls-ca", text)
    if wrong == "another key":
        flags = ("--tls-cert", certificate[0], "--tls-key", certificate[1].with_name("client.key"))
    args = (*PLANE_COMMANDS[command], "tls://127.0.0.1:1", *flags)
    checked, started = run(*args, "--check"), run(*args)
    assert checked.err.startswith("kvevents: tls_ca, tls_certificate or tls_key is not a valid PEM file"), checked.err
    assert checked.err.count("\n") == 1, "one line"
    assert (checked.code, checked.err) == (started.code, started.err)
    assert checked.code == 2


@pytest.mark.parametrize("command", PLANE_COMMANDS)
def test_check_refuses_a_plane_if_nats_is_not_installed(command: str) -> None:
    program = "import sys; sys.modules['nats'] = None; from kvevents.cli.program import main; sys.exit(main(sys.argv[1:]))"
    args = (*PLANE_COMMANDS[command], "nats://127.0.0.1:1")
    for more in ((), ("--check",)):
        with Program(*args, *more, command=(sys.executable, "-c", program)) as started:
            ended = started.end()
        assert ended.code == 2
        what = (
            "a replica of a plane needs the package nats" if command == "serve" else "kvevents bridge needs the package nats.js"
        )
        assert ended.err == f"kvevents: {what}: install kvevents[plane], see Install in the documentation"


ELSEWHERE = ("192.0.2.1", "kvevents.invalid")
"""An address that no machine has (RFC 5737), and a host name that never resolves (RFC 6761)."""


@pytest.mark.parametrize("host", [*ELSEWHERE, "in use"])
def test_check_refuses_an_address_that_serve_cannot_listen_at(host: str) -> None:
    with occupy_port() as port:
        at = ("--host", "127.0.0.1", "--port", port) if host == "in use" else ("--insecure", "--host", host, "--port", 0)
        checked, served = run("serve", *at, "--check"), run("serve", *at)
    assert checked.err.startswith(f"kvevents: cannot listen at {at[-3]} port {at[-1]}: "), checked.err
    assert checked.err.count("\n") == 1, "one line"
    assert (checked.code, checked.err) == (served.code, served.err)
    assert checked.code == 2


@pytest.mark.parametrize("host", [*ELSEWHERE, "in use"])
def test_check_refuses_an_address_at_which_bridge_cannot_serve_metrics(host: str) -> None:
    with occupy_port() as port:
        at = ("--metrics-port", port, "--metrics-host", "127.0.0.1" if host == "in use" else host)
        args = ("bridge", "--nats", "nats://127.0.0.1:1", "--model", "m", "--worker", f"a={PORTS[0]}", *at)
        checked, bridged = run(*args, "--check"), run(*args)
    assert checked.err.startswith(f"kvevents: cannot serve metrics at {at[-1]}:{port}: "), checked.err
    assert checked.err.count("\n") == 1, "one line"
    assert (checked.code, checked.err) == (bridged.code, bridged.err)
    assert checked.code == 1


@contextmanager
def occupy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


PORTS = [f"tcp://10.0.0.7:{port}" for port in range(5557, 5561)]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (PORTS[0], PORTS[0], f"endpoint {PORTS[0]} of a rank 1 is the endpoint of a rank 0"),
        (
            f"{PORTS[0]},{PORTS[1]}",
            f"{PORTS[1]},{PORTS[2]}",
            f"endpoint {PORTS[1]} of a rank 1 is the replay_endpoint of a rank 0",
        ),
        (
            f"{PORTS[0]},{PORTS[1]}",
            f"{PORTS[2]},{PORTS[1]}",
            f"replay_endpoint {PORTS[1]} of a rank 1 is the replay_endpoint of",
        ),
        (f"{PORTS[0]},{PORTS[1]}", f"{PORTS[2]},{PORTS[3]}", ""),
    ],
)
def test_ranks_of_one_engine_must_have_different_endpoints(first: str, second: str, expected: str) -> None:
    args = ("serve", "--port", 0, "--model", "m", "--worker", f"a:0={first}", "--worker", f"a:1={second}")
    checked = run(*args, "--check")
    assert expected in checked.err, checked.err
    assert checked.code == (2 if expected else 0)


def test_check_changes_no_state_folder(tmp_path: Path) -> None:
    """A state folder that can be created is not created, and a folder in use by a running service is not an error."""
    folder = tmp_path / "a" / "b"
    checked = run("serve", "--port", 0, "--state-dir", folder, "--check")
    assert (checked.code, list(tmp_path.iterdir())) == (0, []), checked.err
    with serving("--state-dir", folder):
        before = sorted(folder.iterdir())
        assert run("serve", "--port", 0, "--state-dir", folder, "--check").code == 0
        assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"limits": {"max_token": 1}},
            "f: limits: unknown field 'max_token'; did you mean 'max_tokens'? known fields: max_body",
        ),
        ({"zzz": 1}, "f: unknown field 'zzz'; known fields: curve, sources"),
        ({"sources": [{"endpoin": "x"}]}, "f: sources[0]: unknown field 'endpoin'; did you mean 'endpoint'?"),
        (
            {"access": {"tokens": [{"role": "x"}]}},
            "f: access.tokens[0].role: Invalid enum value 'x'; expected read, register",
        ),
        ({"access": {"tokens": [{"rol": "x"}]}}, "f: access.tokens[0]: unknown field 'rol'; did you mean 'role'?"),
        ({"dns": [{"target": "h:1", "tls": 1}]}, "f: dns[0]: unknown field 'tls'; known fields: model"),
        ({"port": "x"}, "f: port: Expected `int`, got `str`"),
        ({"port": -1}, "f: port is -1; it must be from 0 to 65535"),
    ],
)
def test_an_error_names_the_field_and_the_known_fields(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(given, ServiceSettings, "f")
    assert str(caught.value).startswith(message)
