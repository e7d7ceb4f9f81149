// An engine in another language: attaches, stores, looks up and loads, with the generated stubs alone. Needs a daemon on
// the host device.
//
//   npm install && node engine.js
"use strict";

const crypto = require("node:crypto");
const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const { socket } = require("./socket");
const koffi = require("koffi"); // calls libc, which makes the memory; a GPU's would be a cuda_ipc_handle of 64 bytes

const proto = path.join(__dirname, "../../proto/kvsidecar/v1/sidecar.proto");
const { Sidecar } = grpc.loadPackageDefinition(
  loader.loadSync(proto, { keepCase: true, longs: String, enums: String, defaults: true }),
).kvsidecar.v1;
const client = new Sidecar(`unix:${socket}`, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
const call = (method, request) => new Promise((resolve, reject) => {
  client[method](request, metadata, (error, reply) => (error ? reject(error) : resolve(reply)));
});

async function main() {
  const bytes = 4096, count = 8; // of a block, and how many blocks this engine has
  const libc = koffi.load(null);
  const memory = libc.func("int memfd_create(const char *, unsigned int)")("kv", 3); // MFD_CLOEXEC | MFD_ALLOW_SEALING
  fs.writeSync(memory, Buffer.alloc(bytes * count)); // without holes
  libc.func("int fcntl(int, int, ...)")(memory, 1033, "int", 2 | 4); // F_ADD_SEALS: it neither shrinks nor grows again

  const namespace = {
    model: "node-model", dtype: "bfloat16", kv_layout: "LBNHC", block_size: 16, tp_size: 1, pp_size: 1,
    hash_algorithm: "sha256", hash_bytes: 32,
  };
  const region = { block_stride: bytes, row_bytes: bytes, num_rows: 1 };
  const stream = client.Attach(); // while it is open, the engine is attached
  const replies = stream[Symbol.asyncIterator]();
  stream.write({ register: {
    protocol: 2, instance: "node", namespace, world_size: 1, device: "host",
    allocations: [{ own_fd: memory, size: bytes * count }],
    groups: [{ num_blocks: count, num_shards: 1, regions: [region] }],
  } });
  const { session, token, readiness } = (await replies.next()).value.registered;
  for (let { state } = readiness; state !== "STATE_READY";) ({ state } = (await replies.next()).value.readiness);
  metadata.set("kvsidecar-token-bin", token); // who calls

  const computed = crypto.randomBytes(bytes), loaded = Buffer.alloc(bytes);
  const hashes = crypto.createHash("sha256").update(computed).digest();
  const blocks = (id) => [{ hashes, block_ids: Buffer.from(BigInt64Array.of(id).buffer) }];
  fs.writeSync(memory, computed, 0, bytes, 0); // block 0
  const stored = await call("Store", { session, store: { job: 1, blocks: blocks(0n) } });
  console.log(`store: ${stored.outcome}, ${stored.bytes} bytes`);
  const found = await call("Lookup", { namespace, groups: [{ hashes }], mode: "MODE_PREFIX", lease_ms: 10000, token });
  console.log(`${found.groups[0].hits} of 1 blocks can be loaded`);
  const done = await call("Load", { session, load: { job: 2, lease: found.lease, blocks: blocks(5n) } });
  fs.readSync(memory, loaded, 0, bytes, 5 * bytes); // block 5
  console.log(`load: ${done.outcome}, the bytes are ${loaded.equals(computed) ? "equal" : "different"}`);
  await call("Release", { lease: found.lease });
  stream.end();
  while (!(await replies.next()).done); // until the daemon has unmapped the memory
  client.close();
}

main().catch((error) => {
  console.error(`${error.code}: ${error.details || error.message}`);
  process.exit(1);
});
