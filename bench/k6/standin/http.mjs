// What the scripts use of the module k6/http. k6's post returns when the answer is there; Node's fetch does not, so a worker fetches and this
// thread waits.
import { MessageChannel, Worker, receiveMessageOnPort } from 'node:worker_threads';

const signal = new Int32Array(new SharedArrayBuffer(4));
const { port1, port2 } = new MessageChannel();
const worker = new Worker(
  `const { workerData: { port, signal } } = require('node:worker_threads');
  port.on('message', async ({ url, init }) => {
    let answer;
    try {
      const response = await fetch(url, init);
      answer = { status: response.status, headers: [...response.headers], body: await response.text() };
    } catch (error) {
      answer = { status: 0, headers: [], body: '', error: String(error.cause ?? error) };
    }
    port.postMessage(answer);
    Atomics.store(signal, 0, 1);
    Atomics.notify(signal, 0);
  });`,
  { eval: true, workerData: { port: port2, signal }, transferList: [port2] },
);
worker.unref();
port1.unref();

// The keys of payments that were sent.
export const paymentKeys = new Set();

function post(url, body, params = {}) {
  if (url.endsWith('/v1/payments')) paymentKeys.add(params.headers['Idempotency-Key']);
  port1.postMessage({ url, init: { method: 'POST', body, headers: params.headers } });
  // Half a minute, more than any answer of the service takes.
  if (Atomics.wait(signal, 0, 0, 30_000) === 'timed-out') throw new Error(`no answer from ${url}`);
  Atomics.store(signal, 0, 0);
  const { message } = receiveMessageOnPort(port1);
  if (message.error) throw new Error(`${url}: ${message.error}`);
  return {
    status: message.status,
    body: message.body,
    // k6 spells the names of headers as Go does.
    headers: Object.fromEntries(message.headers.map(([name, value]) => [name.replace(/(^|-)[a-z]/g, (c) => c.toUpperCase()), value])),
    json: (selector) => (selector ? JSON.parse(message.body)[selector] : JSON.parse(message.body)),
  };
}

export default { post, expectedStatuses: () => undefined };
