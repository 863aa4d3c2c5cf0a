// Perfetto's trace processor, as its web page runs it: node perfetto_processor.js FOLDER
// takes messages of its RPC from stdin, and writes its replies to stdout. FOLDER has engine_bundle.js.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const exit = process.exit.bind(process);
const file = (name) => path.join(folder, path.basename(String(name)));

// What a worker of a browser has.
globalThis.self = globalThis;
globalThis.location = { href: "file://" + file("engine_bundle.js") };
globalThis.importScripts = () => {};
globalThis.WorkerGlobalScope = function () {};
globalThis.fetch = async (name) =>
  new Response(fs.readFileSync(file(name)), { headers: { "Content-Type": "application/wasm" } });
globalThis.XMLHttpRequest = class {
  open(_, name) {
    this.name = name;
  }
  send() {
    this.status = 200;
    this.response = fs.readFileSync(file(this.name));
  }
};
vm.runInThisContext("var process = undefined;");

const ready = "this.reqBufferAddr=this.wasmPtrCast(";
const engine = fs.readFileSync(file("engine_bundle.js"), "utf8");
if (!engine.includes(ready)) throw new Error("another engine than this script knows");
vm.runInThisContext(engine.replace(ready, "globalThis.isReady=true," + ready));

const replies = [];
const port = { postMessage: (reply) => replies.push(Buffer.from(reply)) };
self.onmessage({ data: port });
const requests = new Uint8Array(fs.readFileSync(0));

(function poll() {
  if (!globalThis.isReady) return setTimeout(poll, 20);
  setTimeout(() => {
    port.onmessage({ data: requests });
    const bytes = Buffer.concat(replies);
    for (let at = 0; at < bytes.length; ) at += fs.writeSync(1, bytes, at);
    exit(0);
  });
})();
