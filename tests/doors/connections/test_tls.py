"""The files of a server's certificate: which are refused and why, and when they are read again."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from penstock.doors.connections.tls import CHECK_INTERVAL_S, ServerCertificate
from penstock.errors import ConfigError
from tests.certificates import write_certificate
from tests.clock import Clock


def refusal(cert: Path, key: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ServerCertificate(cert, key)
    return caught.value


def test_files_that_cannot_be_used_are_refused_with_the_reason(tmp_path: Path) -> None:
    for name in ("one", "other", "encrypted"):
        (tmp_path / name).mkdir()
    one, other = write_certificate(tmp_path / "one"), write_certificate(tmp_path / "other")
    encrypted = write_certificate(tmp_path / "encrypted", password="secret")
    missing, empty, broken = tmp_path / "missing", tmp_path / "empty", tmp_path / "broken"
    empty.touch()
    broken.write_bytes(one.cert.read_bytes()[:200])
    assert refusal(missing, one.key).message == f"The certificate {missing} does not exist."
    assert refusal(one.cert, missing).message == f"The private key {missing} does not exist."
    assert refusal(tmp_path, one.key).message == f"The certificate {tmp_path} cannot be read: Is a directory."
    for bad in (empty, broken, one.key):
        assert refusal(bad, one.key).message == f"{bad} has no certificate in PEM format."
    for bad in (empty, broken, one.cert):
        assert refusal(one.cert, bad).message == f"{bad} has no private key in PEM format."
    assert refusal(one.cert, other.key).message == (f"The private key {other.key} does not belong to the certificate {one.cert}.")
    assert refusal(encrypted.cert, encrypted.key).message == f"The private key {encrypted.key} is encrypted."
    assert "openssl pkey" in refusal(encrypted.cert, encrypted.key).hint


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_certificate(tmp_path)

    def deny(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied")  # root may read every file

    monkeypatch.setattr(Path, "read_bytes", deny)
    assert refusal(files.cert, files.key).message == f"The certificate {files.cert} cannot be read: Permission denied."


def test_changed_files_are_read_again_but_not_all_the_time(tmp_path: Path) -> None:
    clock = Clock()
    certificate = ServerCertificate(*write_certificate(tmp_path), clock=clock)
    first = certificate.context()
    write_certificate(tmp_path)
    assert certificate.context() is first
    clock.now += CHECK_INTERVAL_S
    second = certificate.context()
    assert second is not first
    clock.now += CHECK_INTERVAL_S
    assert certificate.context() is second


def test_changed_files_that_cannot_be_used_leave_things_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    files = write_certificate(tmp_path)
    certificate = ServerCertificate(*files, clock=clock)
    first = certificate.context()
    good_key = files.key.read_bytes()
    write_certificate(tmp_path)
    files.key.write_bytes(good_key)  # as long as only one of the two files is new
    for _ in range(3):
        clock.now += CHECK_INTERVAL_S
        assert certificate.context() is first
    assert caplog.text.count("does not belong to") == 1
    files.cert.unlink()
    clock.now += CHECK_INTERVAL_S
    assert certificate.context() is first
    assert "does not exist" in caplog.text
    write_certificate(tmp_path)
    clock.now += CHECK_INTERVAL_S
    assert certificate.context() is not first


def test_a_certificate_that_has_expired_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ServerCertificate(*write_certificate(tmp_path))
    assert not caplog.text
    ServerCertificate(*write_certificate(tmp_path, days=-1))
    assert "clients will refuse the certificate" in caplog.text


@pytest.mark.parametrize(
    "names,address,host",
    [
        (["localhost", "127.0.0.1"], "127.0.0.1", "127.0.0.1"),
        (["example.org", "localhost"], "127.0.0.1", "localhost"),
        (["*.example.org", "box.example.org"], "127.0.0.1", "box.example.org"),
        (["*.example.org"], "127.0.0.1", "127.0.0.1"),
        (["::1"], "::1", "::1"),
        (["localhost", "box.example.org"], "192.0.2.7", "box.example.org"),
        (["localhost"], "192.0.2.7", "192.0.2.7"),
    ],
)
def test_the_url_has_a_name_of_the_certificate(names: list[str], address: str, host: str, tmp_path: Path) -> None:
    assert ServerCertificate(*write_certificate(tmp_path, *names)).name_for(address) == host


def test_old_versions_of_tls_are_not_spoken(tmp_path: Path) -> None:
    assert ServerCertificate(*write_certificate(tmp_path)).context().minimum_version == ssl.TLSVersion.TLSv1_2
