"""The certificate of host-name mode: the operator's, or one that a CA of this server's own signs.

The CA and what it signs lie under `<state>/tls`. The CA is kept, so that clients trust it once; the
certificate is made anew when it nears its end or does not fit the domain.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sandyard.config import Settings, bare_domain
from sandyard.errors import ConfigError, HostError

log = structlog.get_logger("sandyard.tls")

CA_FILE = "ca.pem"
CA_DAYS = 3650
CERT_DAYS = 365  # some clients refuse more than 398
RENEW_DAYS = 30
_CLOCK_SKEW = timedelta(days=1)


def names_of(domain: str) -> list[str]:
    """What a certificate for `domain` must cover: itself, and each host below it."""
    return [domain, f"*.{domain}", f"api.{domain}"]


class TlsIdentity:
    """A certificate with its key, and the context that shows it to clients.

    Raises `ConfigError` for a given certificate that does not load or does not cover the domain, and
    `HostError` where its own cannot be kept. `ca` is what clients must trust, None for a given one.
    """

    def __init__(self, settings: Settings) -> None:
        server = settings.server
        self.domain = bare_domain(server.domain) if server.domain else None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self.ca: Path | None = None
        self._folder = settings.paths.state / "tls"
        self._given = (server.tls_cert, server.tls_key) if server.tls_cert and server.tls_key else None
        self._loaded: tuple[int, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Renew what is due, and load what changed: connections from now on see it."""
        if self._given is not None:
            self._load(*self._given)
        elif self.domain is not None:
            try:
                self.ca, cert, key = own_certificate(self._folder, self.domain)
            except OSError as error:
                remedy = "run as the user that owns paths.state"
                raise HostError(f"certificates in {self._folder}: {error.strerror}", remedy=remedy) from error
            self._load(cert, key)

    def _load(self, cert: Path, key: Path) -> None:
        try:
            state = (cert.stat().st_mtime_ns, key.stat().st_mtime_ns)
            if state == self._loaded:
                return
            if self.domain is not None:
                _check_names(cert, self.domain)
            self.context.load_cert_chain(cert, key)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            remedy = "server.tls_cert and server.tls_key must be a PEM certificate (chain) and its key"
            raise ConfigError(f"TLS certificate {cert} with key {key}: {error}", remedy=remedy) from error
        self._loaded = state


def own_certificate(folder: Path, domain: str) -> tuple[Path, Path, Path]:
    """Paths of the CA, of a certificate for `domain` that it signed, and of its key; made where missing or due."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    ca_path, cert_path, key_path = folder / CA_FILE, folder / "cert.pem", folder / "key.pem"
    ca = _read_pair(ca_path, folder / "ca-key.pem")
    if ca is None or _days_left(ca[0]) < CERT_DAYS + RENEW_DAYS:
        if ca_path.exists():
            log.warning("a new CA: clients must trust it anew", path=str(ca_path))
        ca = _make_ca()
        _write_pair(ca_path, folder / "ca-key.pem", *ca)
    leaf = _read_pair(cert_path, key_path)
    if leaf is None or not _still_fits(leaf[0], ca[0], domain):
        _write_pair(cert_path, key_path, *_make_leaf(domain, *ca))
    return ca_path, cert_path, key_path


def _still_fits(cert: x509.Certificate, ca: x509.Certificate, domain: str) -> bool:
    try:
        cert.verify_directly_issued_by(ca)
    except Exception:  # noqa: BLE001 - whatever is wrong with its signature, another is made
        return False
    return set(names_of(domain)) <= set(_names(cert)) and _days_left(cert) >= RENEW_DAYS


def _make_ca() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = _name(f"Sandyard CA {serial % 0xFFFFFF:06x}")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = _builder(name, name, key, serial, CA_DAYS, usage, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(key, hashes.SHA256()), key


def _make_leaf(
    domain: str, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    serial, usage = x509.random_serial_number(), _usage(digital_signature=True)
    # The names below are what counts; a common name may not be longer.
    builder = _builder(_name(domain[:64]), ca.subject, key, serial, CERT_DAYS, usage, ca_key.public_key())
    names = x509.SubjectAlternativeName([x509.DNSName(name) for name in names_of(domain)])
    builder = (
        builder.add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    return builder.sign(ca_key, hashes.SHA256()), key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    serial: int,
    days: int,
    usage: x509.KeyUsage,
    issuer_key: CertificateIssuerPublicKeyTypes,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), serial, now - _CLOCK_SKEW, now + timedelta(days))
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _check_names(cert: Path, domain: str) -> None:
    covered = _names(x509.load_pem_x509_certificate(cert.read_bytes()))
    if f"*.{domain}" not in covered:
        raise ValueError(f"it does not cover *.{domain}, only {', '.join(covered) or 'nothing'}")


def _names(cert: x509.Certificate) -> Sequence[str]:
    try:
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [name.lower() for name in found.value.get_values_for_type(x509.DNSName)]


def _days_left(cert: x509.Certificate) -> float:
    return (cert.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def _read_pair(cert_path: Path, key_path: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None:
    """None where there is none, or none that is whole."""
    try:
        cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        return None
    return cert, key


def _write_pair(cert_path: Path, key_path: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _replace(key_path, secret, 0o600)
    _replace(cert_path, cert.public_bytes(serialization.Encoding.PEM), 0o644)


def _replace(path: Path, data: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    temporary.replace(path)
