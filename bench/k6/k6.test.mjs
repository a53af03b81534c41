// Runs the default function of each script against a running service, through a small stand-in of k6:
//
//   go run ./cmd/payments dev         in one terminal
//   node --test bench/k6/k6.test.mjs  in another
//
// BASE_URL and API_KEY name another service, as they do for k6.
import assert from 'node:assert/strict';
import test from 'node:test';
import './standin/register.mjs';

globalThis.__ENV = { ...process.env };
globalThis.__VU = 1;
globalThis.__ITER = 0;

const { checks } = await import('./standin/k6.mjs');
const { paymentKeys } = await import('./standin/http.mjs');

for (const [script, expected] of [
  ['spread.js', ['the order is there', 'it is paid', 'it is no replay', 'a repeat gets the same bytes', 'and is a replay']],
  [
    'hot.js',
    ['the order is there', 'it is paid, or in flight', 'in flight says so, and when to come back', 'whoever waits gets the answer', 'the answer is the one that others got'],
  ],
]) {
  test(`${script}: three iterations, every check holds`, async (t) => {
    const { default: iterate, options, setup } = await import(`./${script}`);
    assert.deepEqual(Object.keys(options.scenarios), [script.replace('.js', '')]);
    assert.deepEqual(options.thresholds.checks, ['rate==1']);

    const data = setup();
    checks.length = 0;
    paymentKeys.clear();
    for (globalThis.__ITER = 0; globalThis.__ITER < 3; globalThis.__ITER++) iterate(data);

    for (const c of checks) assert.ok(c.ok, `${c.name}: status ${c.status}, ${c.body}`);
    assert.deepEqual([...new Set(checks.map((c) => c.name))], expected);
    t.diagnostic(`keys sent: ${paymentKeys.size}`); // as many charges there must be
  });
}
