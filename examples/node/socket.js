"use strict";

const path = require("node:path");

// Where the daemon of this user listens: docs/getting-started.md.
function defaultSocket() {
  const uid = process.geteuid();
  const runtime = process.env.XDG_RUNTIME_DIR || "";
  if (uid === 0) return "/run/kvsidecar/kvsidecar.sock";
  return path.isAbsolute(runtime) ? path.join(runtime, "kvsidecar/kvsidecar.sock") : `/tmp/kvsidecar-${uid}/kvsidecar.sock`;
}

exports.socket = process.env.KVSIDECAR_SOCKET || defaultSocket();
