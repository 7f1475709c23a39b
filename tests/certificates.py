"""Certificates for tests, made by openssl."""

import subprocess

from csd_link.nvmeof.tls import Credentials

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _make(folder, name, *more):
    """Credentials of a new certificate, signed by itself unless `more` names a CA."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", *KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", cert]
    subprocess.run([*command, *more], check=True, capture_output=True)
    return Credentials(str(cert), str(key))


def _signed(folder, name, ca, *names):
    """Credentials of a certificate of a CA, with subject alternative names."""
    more = ("-CA", ca.cert, "-CAkey", ca.key, "-addext", "basicConstraints=critical,CA:FALSE")
    certificate = _make(folder, name, *more, *(("-addext", f"subjectAltName={','.join(names)}") if names else ()))
    return Credentials(certificate.cert, certificate.key, ca.cert)


def certificates(folder, nqn):
    """Credentials of a local drive and a remote one, of a host and one by its NQN, and of both sides by another CA."""
    folder.mkdir()
    ca, other = _make(folder, "ca"), _make(folder, "other-ca")
    return {
        "drive": _signed(folder, "drive", ca, "IP:127.0.0.1", "DNS:localhost"),
        "elsewhere": _signed(folder, "elsewhere", ca, "DNS:drive.example"),
        "host": _signed(folder, "host", ca),
        "named": _signed(folder, "named", ca, f"URI:{nqn}"),
        "stranger": Credentials(_signed(folder, "stranger", other).cert, str(folder / "stranger.key"), ca.cert),
        "impostor": _signed(folder, "impostor", other, "IP:127.0.0.1"),
    }
