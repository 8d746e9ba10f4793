"""The identity of a cluster: kept over restarts, refused when it is damaged or open to others."""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters import Cluster, SetClock
from penstock.errors import CertificateError, UsageError, WrongClusterError
from penstock.trust import certificates
from penstock.trust.credentials import Credentials
from penstock.trust.identity import ClusterIdentity
from penstock.trust.peer_names import PeerName, new_run, rank_role
from penstock.trust.tls import own_certificate_der

NOW = 1_800_000_000.0
DAY_S = 24 * 3600.0


def opened(directory: Path, now: float = NOW) -> ClusterIdentity:
    return ClusterIdentity.open(directory, SetClock(now))


def test_r15_the_identity_survives_a_restart(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "head"), opened(tmp_path / "head", NOW + 365 * DAY_S)
    assert first.public_key == second.public_key
    assert first.certificate_pem == second.certificate_pem
    assert first.name == second.name == certificates.fingerprint(first.public_key).hex()[:32]
    assert opened(tmp_path / "other").name != first.name


def test_r15_the_key_is_its_owners_alone(tmp_path: Path) -> None:
    opened(tmp_path / "head")
    (file,) = (tmp_path / "head").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "head").stat().st_mode) == 0o700
    file.chmod(0o644)
    with pytest.raises(UsageError, match="other users have access"):
        opened(tmp_path / "head")


def test_r15_the_processes_of_an_epoch_and_they_alone_have_its_key(tmp_path: Path) -> None:
    identity = opened(tmp_path / "head")
    names = [
        PeerName(cluster=identity.name, host=host, role=rank_role(rank), run=identity.run, epoch=epoch)
        for epoch in (0, 1)
        for rank, host in enumerate(("tower", "desk"))
    ]
    one, same, later, later_same = (identity.link_credentials(name).epoch_key for name in names)
    assert (one, later) == (same, later_same)
    assert one != later
    assert len(one) == 32
    restarted = opened(tmp_path / "head")
    again = msgspec.structs.replace(names[0], run=restarted.run)
    assert restarted.run != identity.run
    assert restarted.link_credentials(again).epoch_key != one
    with pytest.raises(AssertionError, match="another run"):
        restarted.link_credentials(names[0])


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_damaged_identity_is_refused_and_not_replaced(tmp_path: Path, content: bytes) -> None:
    opened(tmp_path / "head")
    (file,) = (tmp_path / "head").iterdir()
    file.write_bytes(content)
    with pytest.raises(UsageError, match="does not hold the key and certificate of a cluster"):
        opened(tmp_path / "head")
    assert file.read_bytes() == content


def test_a_key_and_a_certificate_of_two_clusters_are_refused(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "one"), opened(tmp_path / "other")
    (file,) = (tmp_path / "one").iterdir()
    key = file.read_bytes().removesuffix(one.certificate_pem)
    file.write_bytes(key + other.certificate_pem)
    with pytest.raises(UsageError, match="does not hold"):
        opened(tmp_path / "one")


def test_r15_a_certificate_says_who_for_what_and_how_long(tmp_path: Path) -> None:
    identity = opened(tmp_path / "head")
    key = certificates.new_key()
    pem = identity.sign_host(certificates.signing_request(key), "desk")
    found = x509.load_pem_x509_certificate(pem)
    assert certificates.is_pair(key, pem)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [f"penstock://{identity.name}/host/desk/agent/0"]
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usages = {
        usage.dotted_string for usage in found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    }
    assert usages == {"1.3.6.1.5.5.7.3.1", "1.3.6.1.5.5.7.3.2"}  # server and client
    assert found.not_valid_before_utc.timestamp() == NOW - certificates.CLOCK_SKEW_S
    end = NOW + certificates.HOST_LIFE_S + certificates.CLOCK_SKEW_S
    assert found.not_valid_after_utc.timestamp() == end


@pytest.mark.parametrize("offset_s", [-1.9 * DAY_S, 0.0, certificates.HOST_LIFE_S + 1.9 * DAY_S])
def test_clocks_of_two_hosts_may_differ(tmp_path: Path, offset_s: float) -> None:
    identity = opened(tmp_path / "head")
    certificate = own_certificate_der(identity.head_credentials("tower"))
    name = certificates.check_signed(certificate, identity.public_key, NOW + offset_s)
    assert name == PeerName(cluster=identity.name, host="tower", role="head")


def test_the_heads_certificate_is_renewed_in_the_second_half_of_its_life(tmp_path: Path) -> None:
    """It is also renewed if a clock that was wrong has dated it in the future."""
    clock = SetClock(NOW)
    identity = ClusterIdentity.open(tmp_path / "head", clock)
    first = identity.head_credentials("tower")
    clock.seconds = NOW + 0.49 * certificates.HOST_LIFE_S
    assert identity.head_credentials("tower") is first
    clock.seconds = NOW + 0.51 * certificates.HOST_LIFE_S
    second = identity.head_credentials("tower")
    assert second.certificate_pem != first.certificate_pem
    assert second.key_pem != first.key_pem
    clock.seconds = NOW
    third = identity.head_credentials("tower")
    certificates.check_signed(own_certificate_der(third), identity.public_key, NOW)
    assert identity.head_credentials("tower") is third


@pytest.mark.parametrize("offset_s", [-2.1 * DAY_S, certificates.HOST_LIFE_S + 2.1 * DAY_S])
def test_a_certificate_out_of_its_time_is_refused(tmp_path: Path, offset_s: float) -> None:
    identity = opened(tmp_path / "head")
    certificate = own_certificate_der(identity.head_credentials("tower"))
    with pytest.raises(CertificateError, match="not valid at this host's time") as caught:
        certificates.check_signed(certificate, identity.public_key, NOW + offset_s)
    assert "clocks" in caught.value.remedy


def test_r15_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "one"), opened(tmp_path / "other")
    certificate = own_certificate_der(one.head_credentials("tower"))
    with pytest.raises(WrongClusterError):
        certificates.check_signed(certificate, other.public_key, NOW)
    for damaged in (b"", b"\x30\x82", certificate[:-1], certificate[:40] + b"\x00" + certificate[41:]):
        with pytest.raises(WrongClusterError):
            certificates.check_signed(damaged, one.public_key, NOW)
    with pytest.raises(WrongClusterError):
        certificates.check_signed(certificate, b"not a key", NOW)


def request_of(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.DER)


def test_r15_a_bad_request_for_a_certificate_is_refused(tmp_path: Path) -> None:
    identity = opened(tmp_path / "head")
    good = certificates.signing_request(certificates.new_key())
    wrong_signature = bytearray(good)
    wrong_signature[-1] ^= 1
    bad = [b"", b"garbage", good[:-3], bytes(wrong_signature)]
    bad += [
        request_of(ec.generate_private_key(ec.SECP384R1())),
        request_of(ed25519.Ed25519PrivateKey.generate()),
    ]
    for request in bad:
        with pytest.raises(CertificateError):
            identity.sign_host(request, "desk")


def test_r15_the_name_comes_from_the_head_and_not_from_the_request(tmp_path: Path) -> None:
    identity = opened(tmp_path / "head")
    key = ec.generate_private_key(ec.SECP256R1())
    wish = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("penstock://x/host/tower/head/0")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.add_extension(wish, critical=False).sign(key, hashes.SHA256())
    name = PeerName(cluster=identity.name, host="desk", role=rank_role(3), run="0" * 16, epoch=17)
    pem = identity.sign_link(request.public_bytes(serialization.Encoding.DER), name)
    assert certificates.read_certificate(pem)[1] == name
    assert name.uri.endswith("/host/desk/rank-3/0000000000000000/17")


@pytest.mark.parametrize("host", ["", "a b", "a/b", "-a", "a.", "ü", "a" * 65, "a\n"])
def test_a_host_name_that_no_certificate_can_carry_is_refused(tmp_path: Path, host: str) -> None:
    identity = opened(tmp_path / "head")
    with pytest.raises(UsageError, match="is not a valid host name"):
        identity.sign_host(certificates.signing_request(certificates.new_key()), host)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://" + "0" * 32 + "/host/a/agent/0",
        "penstock://0/host/a/agent/0",
        "penstock://" + "0" * 32 + "/host/a/agent/00",
        "penstock://" + "0" * 32 + "/host/a/agent/-1",
        "penstock://" + "0" * 32 + "/host/a/agent/0\n",
        "penstock://" + "0" * 32 + "/host/a/b/agent/0",
        "penstock://" + "0" * 32 + "/host/a/rank-1/0123/0",
        "penstock://" + "0" * 32 + "/host/a/rank-1//0",
        "penstock://" + "0" * 32 + "/host/a/rank-1/0123456789ABCDEF/0",
    ],
)
def test_what_is_not_a_name_of_a_process_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        PeerName.parse(uri)


def test_names_are_read_as_they_are_written() -> None:
    name = PeerName(cluster="0123456789abcdef" * 2, host="desk.lan-2_b", role=rank_role(12), epoch=10**17)
    assert PeerName.parse(name.uri) == name
    of_run = msgspec.structs.replace(name, run=new_run())
    assert PeerName.parse(of_run.uri) == of_run != name


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("fuzz") / "head")


@settings(deadline=None, max_examples=200, derandomize=True)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), is_cut=st.booleans())
def test_r15_a_damaged_request_or_certificate_is_a_typed_error(
    fuzzed: Cluster, place: float, byte: int, is_cut: bool
) -> None:
    """Whatever byte is changed, or wherever it ends: nothing is signed, and nobody is known."""
    good = certificates.signing_request(certificates.new_key())
    for content, read, error in (
        (good, lambda damaged: fuzzed.identity.sign_host(damaged, "desk"), CertificateError),
        (
            fuzzed.certificate,
            lambda damaged: certificates.check_signed(damaged, fuzzed.identity.public_key, NOW),
            WrongClusterError,
        ),
    ):
        cut = int(place * len(content))
        damaged = content[:cut] + (b"" if is_cut else bytes([byte]) + content[cut + 1 :])
        if damaged != content:
            with pytest.raises(error):
                read(damaged)


# --- credentials ----------------------------------------------------------------------------------


def test_r15_credentials_reach_a_process_in_memory_without_a_name(tmp_path: Path) -> None:
    made = Cluster(tmp_path / "head").link_credentials("desk", rank_role(1), epoch=4)
    handle = made.to_memory()
    program = (
        "import sys; from penstock.trust.credentials import Credentials; from penstock.trust import tls\n"
        "credentials = Credentials.from_memory(int(sys.argv[1]))\n"
        "tls.link_client_context(credentials); tls.link_server_context(credentials)\n"
        "print(len(credentials.key_pem))"
    )
    try:
        child = subprocess.run(
            [sys.executable, "-c", program, str(handle)],
            pass_fds=[handle],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        again = Credentials.from_memory(handle)
    assert (child.returncode, child.stdout.strip()) == (0, str(len(made.key_pem))), child.stderr
    assert again == made


def test_credentials_in_memory_cannot_be_changed(tmp_path: Path) -> None:
    handle = Cluster(tmp_path / "head").head_credentials.to_memory()
    with pytest.raises(PermissionError):
        os.pwrite(handle, b"x", 0)
    os.close(handle)


def test_r15_credentials_show_nothing_of_themselves(tmp_path: Path) -> None:
    made = Cluster(tmp_path / "head").head_credentials
    assert repr(made) == str(made) == "Credentials(…)"
    assert "PRIVATE" not in f"{[made]}"


def test_credentials_in_a_file_are_private_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    made, path = Cluster(tmp_path / "head").head_credentials, tmp_path / "worker" / "credentials"
    with pytest.raises(FileNotFoundError):
        Credentials.load(path)
    made.save(path)
    assert Credentials.load(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"\xc1")
    with pytest.raises(UsageError, match="damaged"):
        Credentials.load(path)


def test_without_the_library_modules_load_and_the_first_use_names_the_extra(tmp_path: Path) -> None:
    program = (
        "import importlib, pathlib, pkgutil, sys, time\n"
        "sys.modules['cryptography'] = None\n"
        "import penstock.trust as room\n"
        "for module in pkgutil.iter_modules(room.__path__):\n"
        "    importlib.import_module(f'penstock.trust.{module.name}')\n"
        "from penstock.errors import UsageError\n"
        "from penstock.trust.identity import ClusterIdentity\n"
        "try:\n"
        "    ClusterIdentity.open(pathlib.Path(sys.argv[1]), time.time)\n"
        "except UsageError as error:\n"
        "    print(error.code, error.remedy)\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "head")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("missing_library ")
    assert "pip install 'penstock[hosts]'" in result.stdout


def test_a_rank_needs_no_library_for_its_links(tmp_path: Path) -> None:
    made = Cluster(tmp_path / "head").link_credentials("desk", rank_role(1), epoch=4)
    handle = made.to_memory()
    program = (
        "import sys\n"
        "sys.modules['cryptography'] = None\n"
        "from penstock.trust import challenge, credentials, door, tls\n"
        "made = tls.link_client_context(credentials.Credentials.from_memory(int(sys.argv[1])))\n"
        "print(int(made.verify_mode))\n"
    )
    arguments = [sys.executable, "-c", program, str(handle)]
    result = subprocess.run(
        arguments, pass_fds=[handle], capture_output=True, text=True, timeout=60, check=False
    )
    Credentials.from_memory(handle)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(int(ssl.CERT_REQUIRED))
