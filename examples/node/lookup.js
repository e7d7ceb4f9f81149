// A router in another language: asks a daemon what it has of a prompt, in plain gRPC over the Unix socket.
//
//   npm install && node lookup.js demo-model sha256-of-block-0 sha256-of-block-1 ...
//
// It needs the .proto only (here that of the repository). engine.js attaches memory, too.
"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const { socket } = require("./socket");

const definition = loader.loadSync(path.join(__dirname, "../../proto/kvsidecar/v1/sidecar.proto"), {
  keepCase: true,
  longs: String, // 64-bit numbers do not fit JavaScript's
  enums: String,
  defaults: true,
});
const { Sidecar } = grpc.loadPackageDefinition(definition).kvsidecar.v1;

const client = new Sidecar(`unix:${socket}`, grpc.credentials.createInsecure());

function call(method, request) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + 5000;
    client[method](request, { deadline }, (error, reply) => (error ? reject(error) : resolve(reply)));
  });
}

async function main() {
  const [model = "demo-model", ...hashes] = process.argv.slice(2);
  const status = await call("Status", {});
  console.log(`kvsidecar ${status.version}: ${status.readiness.state}`);
  const reply = await call("Lookup", {
    // What must be equal to share blocks: the same as the engine's, field by field.
    namespace: {
      model, dtype: "bfloat16", kv_layout: "LBNHC", block_size: 16, tp_size: 1, pp_size: 1,
      hash_algorithm: "sha256", hash_bytes: 32,
    },
    groups: [{ group: 0, hashes: Buffer.concat(hashes.map((each) => Buffer.from(each, "hex"))) }],
    mode: "MODE_PREFIX",
  });
  for (const group of reply.groups) console.log(`${group.hits} of ${hashes.length} blocks can be loaded`);
  client.close();
}

main().catch((error) => {
  console.error(`${socket}: ${error.code}: ${error.details || error.message}`);
  process.exitCode = 1;
});
