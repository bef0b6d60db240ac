// Perfetto's own reader: node perfetto_reader.js FOLDER TRACE QUERY... prints the rows of each query as JSON.
//
// FOLDER has `engine_bundle.js` and `trace_processor*.wasm`, as Perfetto's page loads them. The bundle is a web worker:
// it gets a port, and on it requests as protocol buffers (protos/perfetto/trace_processor/trace_processor.proto).
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [folder, trace, ...queries] = process.argv.slice(2);
const APPEND = 1, FINALIZE = 2, QUERY = 3; // TraceProcessorRpc.TraceProcessorMethod
const CHUNK = 1 << 20; // bytes of the trace in one request

// ---- protocol buffers: a message is a list of [number, value]

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}

const whole = (number, value) => Buffer.concat([varint(number * 8), varint(value)]);
const bytes = (number, value) => Buffer.concat([varint(number * 8 + 2), varint(value.length), value]);

class Reader {
  constructor(data) {
    this.data = data;
    this.at = 0;
  }
  varint() {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = this.data[this.at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return Number(BigInt.asIntN(64, value));
    }
  }
  take(length) {
    this.at += length;
    return this.data.subarray(this.at - length, this.at);
  }
  *numbers() {
    while (this.at < this.data.length) yield this.varint();
  }
  *fields() {
    while (this.at < this.data.length) {
      const key = this.varint();
      if ((key & 7) === 0) yield [key >> 3, this.varint()];
      else yield [key >> 3, this.take((key & 7) === 2 ? this.varint() : (key & 7) === 1 ? 8 : 4)];
    }
  }
}

// ---- a web worker's world, of which node has its own

const url = (name) => path.join(folder, path.basename(String(name)));
const self = { location: { href: "file:///engine_bundle.js" } };
const world = vm.createContext({
  self,
  location: self.location,
  WorkerGlobalScope: function () {},
  importScripts() {},
  XMLHttpRequest: class {
    open(method, name) {
      this.name = name;
    }
    send() {
      const data = fs.readFileSync(url(this.name));
      this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
      this.status = 200;
      if (this.onload) this.onload();
    }
  },
  console: { log() {}, warn: console.error, error: console.error },
  URL, TextDecoder, TextEncoder, setTimeout, clearTimeout, performance, crypto,
});
self.WorkerGlobalScope = world.WorkerGlobalScope;
vm.runInContext(fs.readFileSync(url("engine_bundle.js"), "utf8"), world);

const replies = [];
const port = { postMessage: (data) => replies.push(Buffer.from(data)) };
self.onmessage({ data: port });
const Bytes = vm.runInContext("Uint8Array", world);
let sequence = 0;
function ask(method, ...fields) {
  const request = Buffer.concat([whole(1, ++sequence), whole(2, method), ...fields]);
  port.onmessage({ data: Bytes.from(bytes(1, request)) });
}

// rows of a QueryResult: types of cells one after the other, and a list of values for each type
function rows(results) {
  const names = [], found = [];
  const cells = [];
  for (const result of results)
    for (const [number, value] of new Reader(result).fields()) {
      if (number === 1) names.push(value.toString());
      if (number === 2 && value.length) throw new Error(value.toString());
      if (number !== 3) continue;
      const batch = new Map([...new Reader(value).fields()]);
      const numbers = [...new Reader(batch.get(2) || Buffer.alloc(0)).numbers()];
      const floats = batch.get(3) || Buffer.alloc(0);
      const texts = (batch.get(5) || Buffer.alloc(0)).toString().split("\0");
      let float = 0;
      for (const kind of new Reader(batch.get(1) || Buffer.alloc(0)).numbers())
        cells.push(
          kind === 2 ? numbers.shift() : kind === 3 ? floats.readDoubleLE(8 * float++) : kind === 4 ? texts.shift() : null
        );
    }
  while (cells.length) found.push(Object.fromEntries(names.map((name) => [name, cells.shift()])));
  return found;
}

function main() {
  const data = fs.readFileSync(trace);
  for (let at = 0; at < data.length; at += CHUNK) ask(APPEND, bytes(101, data.subarray(at, at + CHUNK)));
  ask(FINALIZE);
  const answers = queries.map((query) => {
    replies.length = 0;
    ask(QUERY, bytes(103, bytes(1, Buffer.from(query))));
    const results = [];
    for (const [, message] of new Reader(Buffer.concat(replies)).fields())
      for (const [number, value] of new Reader(message).fields()) if (number === 203) results.push(value);
    return rows(results);
  });
  process.stdout.write(JSON.stringify(answers));
}

// the bundle compiles the module as it is loaded, and prepares it for requests in a promise
setImmediate(main);
