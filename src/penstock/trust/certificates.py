"""The keys and certificates of a cluster: made, signed and checked by `cryptography` (extra `hosts`).

Keys are P-256, which every OpenSSL accepts for TLS 1.3, in FIPS mode too; that is not sure for Ed25519. Only
this module uses the library. The module can be imported without it, and then raises an error at the first
call that names what is missing. Ranks do not need the library, since they are handed finished certificates.
Keys and certificates are bytes here: PEM where they are kept, and DER where they are compared or sent.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from penstock.errors import CertificateError, PenstockError, UsageError, WrongClusterError
from penstock.trust.peer_names import PeerName

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
except ModuleNotFoundError:
    _IS_INSTALLED = False
else:
    _IS_INSTALLED = True

CLOCK_SKEW_S = 2 * 24 * 3600.0  # the clocks of two hosts may differ by so much
AUTHORITY_LIFE_S = 30 * 365 * 24 * 3600.0
HOST_LIFE_S = 365 * 24 * 3600.0  # of the head's, and of an agent's; renewed in the second half
LINK_LIFE_S = 24 * 3600.0  # of a rank's or visitor's: connections are made at the beginning of an epoch
PUBLIC_KEY_BYTES = 91  # length of a P-256 key as DER

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _with_library(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function raise an error that names the remedy, if the library is not installed."""

    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not _IS_INSTALLED:
            raise UsageError(
                "several machines need the library `cryptography`, which is not installed.",
                remedy="Install it on every host: pip install 'penstock[hosts]'.",
                code="missing_library",
            )
        return function(*args, **kwargs)

    checked.__doc__, checked.__name__ = function.__doc__, function.__name__
    return checked


@_with_library
def new_key() -> bytes:
    """Return a new private key as PEM, not encrypted."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@_with_library
def public_key_of(key_pem: bytes) -> bytes:
    """Return the public half of a private key as DER (SubjectPublicKeyInfo)."""
    return _public_der(_load_key(key_pem).public_key())


def fingerprint(public_key: bytes) -> bytes:
    """Return the SHA-256 of a public key as DER."""
    return hashlib.sha256(public_key).digest()


def cluster_name(public_key: bytes) -> str:
    """Return the name of the cluster whose authority has this key, as it stands in certificates."""
    return fingerprint(public_key)[:16].hex()


@_with_library
def signing_request(key_pem: bytes) -> bytes:
    """Return a request (DER) for a certificate of this key, without a name, which the head decides."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(_load_key(key_pem), hashes.SHA256()).public_bytes(serialization.Encoding.DER)


@_with_library
def sign_authority(key_pem: bytes, now: float) -> bytes:
    """Return the self-signed certificate (PEM) of a cluster's authority.

    Args:
        now: Unix time (seconds since 1970), as everywhere in this module.
    """
    key = _load_key(key_pem)
    name = _common_name(f"Penstock cluster {cluster_name(_public_der(key.public_key()))[:8]}")
    builder = _builder(name, name, key.public_key(), now, AUTHORITY_LIFE_S)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@_with_library
def sign_name(
    authority_key: bytes, authority_pem: bytes, request: bytes, name: PeerName, now: float, life_s: float
) -> bytes:
    """Return a certificate (PEM) that gives a name to the key of a request.

    Args:
        request: the request (DER) of a peer that has proved itself; only the key in it is used.

    Raises:
        CertificateError: the request is damaged or not signed by its own key, or the key is not P-256.
    """
    key, authority = _load_key(authority_key), x509.load_pem_x509_certificate(authority_pem)
    subject = _common_name(f"{name.role} of {name.host}"[:64])
    builder = _builder(subject, authority.subject, _requested_key(request), now, life_s)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([_USAGES.CLIENT_AUTH, _USAGES.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name.uri)]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@_with_library
def check_signed(certificate: bytes, authority_key: bytes, now: float) -> PeerName:
    """Check a certificate of a peer against the authority's public key, and return the name in it.

    Args:
        certificate, authority_key: DER.

    Raises:
        WrongClusterError: another authority has signed the certificate, or it is not one of a cluster.
        CertificateError: the certificate is not valid at this time.
    """
    try:
        found = x509.load_der_x509_certificate(certificate)
        public = serialization.load_der_public_key(authority_key)
        if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(
            found.signature_hash_algorithm, hashes.SHA256
        ):
            raise ValueError("not the algorithms of a cluster")
        public.verify(found.signature, found.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
        name = _name_in(found)
    except _UNREADABLE as error:
        raise WrongClusterError("the certificate of the peer was not signed by this cluster.") from error
    if not found.not_valid_before_utc.timestamp() <= now <= found.not_valid_after_utc.timestamp():
        raise CertificateError(
            f"the certificate of {name.role} of {name.host} is not valid at this host's time.",
            remedy="Check the clocks of both hosts; they may differ by at most two days.",
            code="certificate_expired",
        )
    return name


@_with_library
def read_certificate(certificate_pem: bytes) -> tuple[int, PeerName, float]:
    """Return serial number, name and end of validity (Unix time) of a certificate of our own cluster.

    Raises:
        CertificateError: the certificate is damaged.
    """
    try:
        found = x509.load_pem_x509_certificate(certificate_pem)
        return found.serial_number, _name_in(found), found.not_valid_after_utc.timestamp()
    except _UNREADABLE as error:
        raise CertificateError("a certificate of the cluster is damaged.") from error


@_with_library
def is_fresh(certificate_pem: bytes, now: float) -> bool:
    """Return whether a certificate of the head or of an agent need not be renewed yet.

    It is renewed in the second half of its life, and if a clock that was wrong has dated it in the future.

    Raises:
        CertificateError: the certificate is damaged.
    """
    try:
        found = x509.load_pem_x509_certificate(certificate_pem)
    except _UNREADABLE as error:
        raise CertificateError("a certificate of the cluster is damaged.") from error
    begin, end = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    return begin <= now <= end - CLOCK_SKEW_S - HOST_LIFE_S / 2


@_with_library
def certified_key(certificate_pem: bytes) -> bytes:
    """Return the public key (DER) that a certificate is for.

    Raises:
        CertificateError: the certificate is damaged, or the key is not P-256.
    """
    try:
        return _public_der(x509.load_pem_x509_certificate(certificate_pem).public_key())
    except _UNREADABLE as error:
        raise CertificateError("a certificate of the cluster is damaged.") from error


@_with_library
def is_pair(key_pem: bytes, certificate_pem: bytes) -> bool:
    """Return whether a certificate is for this key; also False if one of the two is damaged."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        return _public_der(certificate.public_key()) == public_key_of(key_pem)
    except PenstockError:
        return False
    except _UNREADABLE:
        return False


if _IS_INSTALLED:
    _USAGES = x509.oid.ExtendedKeyUsageOID
    _UNREADABLE: tuple[type[Exception], ...] = (  # what the library raises for bytes that it cannot read
        *(ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm),
        *(x509.InvalidVersion, x509.ExtensionNotFound, x509.DuplicateExtension),
        *(x509.UnsupportedGeneralNameType, x509.AttributeNotFound),
    )


def _load_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except _UNREADABLE as error:
        raise CertificateError("a private key of the cluster is damaged.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateError("a private key of the cluster is not a P-256 key.")
    return key


def _public_der(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateError("a public key is not a P-256 key.")
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(encoding, form)


def _requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    try:
        parsed = x509.load_der_x509_csr(request)
        key = parsed.public_key()
        valid = parsed.is_signature_valid
    except _UNREADABLE as error:
        raise CertificateError("the request for a certificate is damaged.") from error
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise CertificateError("the request for a certificate is not signed by its own P-256 key.")
    _public_der(key)
    return key


def _name_in(certificate: x509.Certificate) -> PeerName:
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    uris: Sequence[str] = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise ValueError(f"{len(uris)} names")
    return PeerName.parse(uris[0])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, life_s: float
) -> x509.CertificateBuilder:
    """Begin a certificate that is valid for `life_s` from now, and `CLOCK_SKEW_S` before and after that."""
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_time(now - CLOCK_SKEW_S))
    return builder.not_valid_after(_time(now + life_s + CLOCK_SKEW_S))


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
