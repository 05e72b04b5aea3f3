"""The certificate authority of one run: the sandboxes of the run trust it, and nobody else does.

It is made when the run begins. Its key is in this process' memory alone. For each name that is allowed it signs a
certificate, once.
"""

import os
import ssl
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cached_property
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from orchestrator.rules.egress import is_address

_LEAVES = 1_000  # that are kept; signing another one takes less than a millisecond
_LIVES = timedelta(days=365)  # longer than a run; some libraries refuse certificates of more than 398 days
_CLOCKS_DIFFER = timedelta(days=1)


class Authority:
    """Making one takes some milliseconds."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())  # one for all names: they all end here
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "egress of one run")])
        self._contexts = OrderedDict[str, ssl.SSLContext]()
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = builder.add_extension(identifier, critical=False)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    @cached_property
    def certificate(self) -> bytes:
        """What the sandboxes trust, in PEM form."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def context(self, host: str) -> ssl.SSLContext:
        """For a server of this name, which speaks HTTP/1.1 alone."""
        if (context := self._contexts.get(host)) is None:
            context = self._contexts[host] = self._signed(host)
            if len(self._contexts) > _LEAVES:
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(host)
        return context

    def _signed(self, host: str) -> ssl.SSLContext:
        general = x509.IPAddress(ip_address(host)) if is_address(host) else x509.DNSName(host)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
        builder = _builder(subject, self._name, self._leaf_key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName([general]), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(purpose, critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        leaf = builder.sign(self._key, hashes.SHA256())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        key = self._leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _with_file(leaf.public_bytes(serialization.Encoding.PEM) + self.certificate + key, context.load_cert_chain)
        return context


def _with_file(content: bytes, load: Callable[[str], None]) -> None:
    """Python's ssl reads keys from files alone: from one that is in memory and has no name on any disk."""
    number = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(number, content)
        os.lseek(number, 0, os.SEEK_SET)
        load(f"/proc/self/fd/{number}")
    finally:
        with suppress(OSError):
            os.close(number)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _LIVES)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
