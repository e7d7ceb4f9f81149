"""The daemon's certificate, key and client CA bundle: validated before use, reloaded when the files change."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from kvsidecar.errors import ConfigError
from kvsidecar.support import config_files, log

_log = log.get("tls")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    certificate: Path
    """The daemon's certificate chain."""
    key: Path
    client_ca: Path
    """CA bundle that client certificates are verified against."""


class Certificates:
    """Reads the files at startup, and at the first handshake after a change.

    Raises:
        ConfigError: a file is missing, unreadable or invalid, or other users can read the key.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._stamp()
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for a port that requires a client certificate of the CA."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._changed,  # type: ignore[arg-type]  # may return None, says gRPC's documentation
            require_client_authentication=True,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration, or None if nothing changed. gRPC calls this at every handshake, in its own thread."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp  # log invalid files once; half-written ones change again
        try:
            read = self._read()
        except ConfigError as error:
            _log.error("certificates not reloaded: the previous ones stay in use", reason=str(error))
            return None
        except Exception as error:  # noqa: BLE001 - whatever the files hold, handshakes go on
            _log.exception("certificates not reloaded: the previous ones stay in use", reason=str(error))
            return None
        _log.info("certificates reloaded", certificate=str(self._files.certificate))
        return read

    def _stamp(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in (self._files.certificate, self._files.key, self._files.client_ca))

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        certificate = _content("tls_certificate", files.certificate)
        key = _content("tls_key", files.key, check=_check_key)
        authority = _content("tls_client_ca", files.client_ca)
        # With a bad file gRPC only fails handshakes. Python's ssl reports what is wrong, in advance.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(files.certificate, files.key, password=_no_password)
        except (OSError, ValueError) as error:  # also if it was replaced meanwhile
            pair = f"tls_certificate={str(files.certificate)!r} and tls_key={str(files.key)!r}"
            raise ConfigError(f"{pair} are not a matching certificate and key in PEM format ({_why(error)})") from error
        try:
            context.load_verify_locations(cadata=authority.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"tls_client_ca={str(files.client_ca)!r} contains no PEM certificates ({_why(error)})"
            ) from error
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


def _content(option: str, path: Path, check: Callable[[str, os.stat_result], None] = lambda *_: None) -> bytes:
    shown = f"{option}={str(path)!r}"
    try:
        return config_files.read(path, partial(check, shown))
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error.strerror}") from error


def _check_key(shown: str, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o027:  # a group that may read it is how Kubernetes and certificate managers hand one over
        raise ConfigError(
            f"{shown} has mode {mode:04o}: readable by others or writable by its group; chmod 0640 or stricter"
        )
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{shown} belongs to uid {found.st_uid}: it must belong to root or the daemon's user")


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).lower().replace("_", " ")
