"""Certificates of the server that cannot be used: each is refused by its flag, before anything is loaded."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import Certificate
from penstock.config.server import ServerConfig
from penstock.errors import UsageError
from penstock.process import listening, tls

Spoil = Callable[[Path, Path, Path], None]


def config_of(certificate: Certificate) -> ServerConfig:
    return ServerConfig(port=0, ssl_certfile=certificate.certfile, ssl_keyfile=certificate.keyfile)


def test_a_pair_that_fits_becomes_a_context(tmp_path: Path) -> None:
    config = config_of(Certificate(tmp_path))
    context = tls.server_context(config)
    assert isinstance(context, ssl.SSLContext)
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2 or context.minimum_version < 0  # the system's
    with listening.listen(config) as listener:
        assert listening.url(listener, config.scheme).startswith("https://127.0.0.1:")


def test_one_file_may_hold_both(tmp_path: Path) -> None:
    made = Certificate(tmp_path)
    both = tmp_path / "both.pem"
    both.write_bytes(Path(made.keyfile).read_bytes() + Path(made.certfile).read_bytes())
    assert tls.server_context(ServerConfig(ssl_certfile=str(both), ssl_keyfile=str(both))) is not None


def test_without_files_there_is_no_context() -> None:
    assert tls.server_context(ServerConfig()) is None
    assert ServerConfig().scheme == "http"


def removed(certfile: Path, _keyfile: Path, _directory: Path) -> None:
    certfile.unlink()


def a_directory(_certfile: Path, keyfile: Path, _directory: Path) -> None:
    keyfile.unlink()
    keyfile.mkdir()


def of_another(_certfile: Path, keyfile: Path, directory: Path) -> None:
    (directory / "other").mkdir()
    shutil.copy(Certificate(directory / "other").keyfile, keyfile)


def exchanged(certfile: Path, keyfile: Path, _directory: Path) -> None:
    shutil.copy(certfile, keyfile)


def cut(certfile: Path, _keyfile: Path, _directory: Path) -> None:
    certfile.write_bytes(certfile.read_bytes()[:200])


def encrypted(_certfile: Path, keyfile: Path, _directory: Path) -> None:
    key = serialization.load_pem_private_key(keyfile.read_bytes(), None)
    keyfile.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"a password"),
        )
    )


@pytest.mark.parametrize(
    ("spoil", "param", "told"),
    [
        (removed, "ssl_certfile", "cannot be read: No such file or directory"),
        (a_directory, "ssl_keyfile", "cannot be read: Is a directory"),
        (of_another, "ssl_keyfile", "is not the key of --ssl-certfile"),
        (exchanged, "ssl_keyfile", "holds no private key"),
        (cut, "ssl_certfile", "cannot be used: "),
        (encrypted, "ssl_keyfile", "is encrypted"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(
    tmp_path: Path, spoil: Spoil, param: str, told: str
) -> None:
    made = Certificate(tmp_path)
    spoil(Path(made.certfile), Path(made.keyfile), tmp_path)
    with pytest.raises(UsageError) as raised:
        listening.listen(config_of(made))
    assert raised.value.param == param
    assert told in str(raised.value)
    assert raised.value.remedy
