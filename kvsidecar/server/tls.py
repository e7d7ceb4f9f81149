"""The daemon's certificate, key and client CA bundle: validated before use, reloaded when the files change."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvsidecar.errors import ConfigError
from kvsidecar.support import config_files, log

_log = log.get("tls")
PROTOCOL = "h2"
"""The protocol that gRPC's clients name in the handshake (ALPN)."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    certificate: Path
    """The daemon's certificate chain."""
    key: Path
    client_ca: Path
    """CA bundle that client certificates are verified against."""


class Certificates:
    """Reads the files at startup, and at the first handshake after a change. Used by one thread at a time.

    Raises:
        ConfigError: a file is missing, unreadable or invalid, or other users can read the key.

    Args:
        called: what the user calls an option, for the texts of errors.
    """

    def __init__(self, files: TlsFiles, called: Callable[[str], str] = str) -> None:
        self._files, self._called = files, called
        self._seen = self._stamp()
        self._context = self._read()

    def context(self) -> ssl.SSLContext:
        """The context for the next handshake, of a server that requires a client certificate of the CA. Takes as long
        as the files take to read, if they have changed."""
        stamp = self._stamp()
        if stamp == self._seen:
            return self._context
        self._seen = stamp  # log invalid files once; half-written ones change again
        try:
            self._context = self._read()
        except ConfigError as error:
            _log.error("certificates not reloaded: the previous ones stay in use", reason=str(error))
        except Exception as error:  # noqa: BLE001 - whatever the files hold, handshakes go on
            _log.exception("certificates not reloaded: the previous ones stay in use", reason=str(error))
        else:
            _log.info("certificates reloaded", certificate=str(self._files.certificate))
        return self._context

    def _stamp(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in (self._files.certificate, self._files.key, self._files.client_ca))

    def _read(self) -> ssl.SSLContext:
        files = self._files
        certificate_named, key_named, authority_named = map(
            self._called, ("tls_certificate", "tls_key", "tls_client_ca")
        )
        certificate = _content(certificate_named, files.certificate)
        key = _content(key_named, files.key, check=_check_key)
        authority = _content(authority_named, files.client_ca)
        context = _context()
        try:
            with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
                context.load_cert_chain(certificate_file, key_file, password=_no_password)
        except (OSError, ValueError) as error:
            pair = f"{certificate_named}={str(files.certificate)!r} and {key_named}={str(files.key)!r}"
            raise ConfigError(f"{pair} are not a matching certificate and key in PEM format ({_why(error)})") from error
        try:
            context.load_verify_locations(cadata=authority.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{authority_named}={str(files.client_ca)!r} contains no PEM certificates ({_why(error)})"
            ) from error
        return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Before 1.3, OpenSSL keeps 20,000 sessions with their certificates for clients that resume, and negotiates again
    # whenever a client likes.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the bundle may hold an intermediate CA alone
    context.set_alpn_protocols([PROTOCOL])
    return context


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path with this content. OpenSSL takes only paths, and at the file's own there may be another one by now."""
    fd = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


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
