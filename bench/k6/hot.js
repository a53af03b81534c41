// One hot key: all virtual users pay the same order under the same key at the same time, and take the next one in the next second. One of
// them wins; what happens to the others is what there is to see.
//
//   k6 run -e BASE_URL=http://localhost:8080 -e API_KEY=sk_test_demo -e VUS=50 hot.js
import http from 'k6/http';
import { check } from 'k6';

const BASE_URL = __ENV.BASE_URL || 'http://localhost:8080';
const API_KEY = __ENV.API_KEY || 'sk_test_demo';

export const options = {
  scenarios: {
    hot: { executor: 'constant-vus', vus: Number(__ENV.VUS || 50), duration: __ENV.DURATION || '30s' },
  },
  // The second one always holds: it is there so that the summary has the payments apart from the orders.
  thresholds: { checks: ['rate==1'], 'http_req_duration{name:payments}': ['max>=0'] },
  summaryTrendStats: ['count', 'med', 'p(95)', 'p(99)', 'max'],
};

export function setup() {
  return { run: __ENV.RUN || String(Date.now()) }; // gives this run keys of its own
}

export default function (data) {
  // The second is the key. Whoever comes in it, comes with the same; the order, too, is made once and replayed to the others.
  const name = `${data.run}-${Math.floor(Date.now() / 1000)}`;
  const order = post('orders', `order-${name}`, { amount: 1999, currency: 'EUR' });
  check(order, { 'the order is there': (r) => r.status === 201 });

  const payment = { order_id: order.json('id'), amount: 1999, currency: 'EUR', payment_method: 'pm_ok' };
  const first = post('payments', `pay-${name}`, payment);
  check(first, {
    'it is paid, or in flight': (r) => r.status === 201 || r.status === 409,
    'in flight says so, and when to come back': (r) =>
      r.status !== 409 || (r.json('type').endsWith('/problems/idempotency-in-progress') && Number(r.headers['Retry-After']) >= 1),
  });

  // A patient client waits for the answer in the same request.
  const second = post('payments', `pay-${name}`, payment, { Prefer: 'wait=10' });
  check(second, {
    'whoever waits gets the answer': (r) => r.status === 201 && r.json('status') === 'succeeded',
    'the answer is the one that others got': (r) => first.status !== 201 || r.body === first.body,
  });
}

function post(path, key, body, headers) {
  return http.post(`${BASE_URL}/v1/${path}`, JSON.stringify(body), {
    headers: { Authorization: `Bearer ${API_KEY}`, 'Content-Type': 'application/json', 'Idempotency-Key': key, ...headers },
    tags: { name: path },
    responseCallback: http.expectedStatuses(201, 409), // A 409 is an answer here, not a failure.
  });
}
