// All keys different: every iteration pays an order of its own, as many customers do. k6 starts them at a rate, whether or not the earlier
// ones have been answered, so a stall of the service is seen in all that were due during it.
//
//   k6 run -e BASE_URL=http://localhost:8080 -e API_KEY=sk_test_demo -e RATE=50 spread.js
import http from 'k6/http';
import { check } from 'k6';

const BASE_URL = __ENV.BASE_URL || 'http://localhost:8080';
const API_KEY = __ENV.API_KEY || 'sk_test_demo';
const RATE = Number(__ENV.RATE || 50);

export const options = {
  scenarios: {
    spread: { executor: 'constant-arrival-rate', rate: RATE, timeUnit: '1s', duration: __ENV.DURATION || '30s', preAllocatedVUs: 4 * RATE },
  },
  // The second one always holds: it is there so that the summary has the payments apart from the orders.
  thresholds: { checks: ['rate==1'], 'http_req_duration{name:payments}': ['max>=0'] },
  summaryTrendStats: ['count', 'med', 'p(95)', 'p(99)', 'max'],
};

export function setup() {
  return { run: __ENV.RUN || String(Date.now()) }; // gives this run keys of its own
}

export default function (data) {
  const name = `${data.run}-${__VU}-${__ITER}`;
  const order = post('orders', `order-${name}`, { amount: 1999, currency: 'EUR' });
  check(order, { 'the order is there': (r) => r.status === 201 });

  const payment = { order_id: order.json('id'), amount: 1999, currency: 'EUR', payment_method: 'pm_ok' };
  const first = post('payments', `pay-${name}`, payment);
  check(first, {
    'it is paid': (r) => r.status === 201 && r.json('status') === 'succeeded',
    'it is no replay': (r) => r.headers['Idempotent-Replayed'] === 'false',
  });

  // One in ten repeats, as a client does that has lost the answer.
  if (__ITER % 10 === 0) {
    const second = post('payments', `pay-${name}`, payment);
    check(second, {
      'a repeat gets the same bytes': (r) => r.status === 201 && r.body === first.body,
      'and is a replay': (r) => r.headers['Idempotent-Replayed'] === 'true',
    });
  }
}

function post(path, key, body) {
  return http.post(`${BASE_URL}/v1/${path}`, JSON.stringify(body), {
    headers: { Authorization: `Bearer ${API_KEY}`, 'Content-Type': 'application/json', 'Idempotency-Key': key },
    tags: { name: path },
  });
}
